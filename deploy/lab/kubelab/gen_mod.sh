#!/usr/bin/env bash
# Writes go.mod for another release of Kubernetes: k8s.io/kubernetes vX.Y.Z is published with replace lines that point at
# its own staging tree, so each is pointed at the published v0.Y.Z instead. Then `go mod tidy` writes go.sum.
# usage: gen_mod.sh 1.36.3, in this folder
set -euo pipefail
release=${1:?usage: gen_mod.sh 1.36.3}
staging=v0.${release#1.}
go mod download "k8s.io/kubernetes@v$release"
source=$(go env GOMODCACHE)/cache/download/k8s.io/kubernetes/@v/v$release.mod
{
    printf 'module kubelab\n\ngo %s\n\n' "$(awk '$1 == "go" {print $2; exit}' "$source")"
    printf 'require k8s.io/kubernetes v%s\n\nreplace (\n' "$release"
    awk '$2 == "=>" && $3 ~ /^\.\/staging/ {print $1}' "$source" | sort -u | while read -r module; do
        printf '\t%s => %s %s\n' "$module" "$module" "$staging"
    done
    printf ')\n'
} > go.mod
go mod tidy
