"""The volumes of a pod as folders: what is in them, and whose they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deploy.lab.node.api import Api, Object
from deploy.lab.node.environment import Files, NotConfigured, field, resource

_MODE = 0o644


class Volumes:
    """Makes the volumes of one pod.

    Args:
        api: The API server, for tokens.
        pod: The pod.
        folder: Where they go, each in a folder of its name.
        address: Where the pod may listen.
        node: The node's name.
    """

    def __init__(self, api: Api, pod: Object, folder: Path, address: str, node: str) -> None:
        self._api, self._pod, self._folder = api, pod, folder
        self._address, self._node = address, node
        self._files = Files(api, pod["metadata"]["namespace"])
        self._group = (pod["spec"].get("securityContext") or {}).get("fsGroup")

    def make(self) -> dict[str, Path]:
        """Make all of them; returns the folder of each by name.

        Raises:
            NotConfigured: what one names is not there, or it is of a kind that this node does not have.
        """
        return {volume["name"]: self._make(volume) for volume in self._pod["spec"].get("volumes") or []}

    def _make(self, volume: Object) -> Path:
        folder = self._folder / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            os.chown(folder, 0, self._group or 0)
            folder.chmod(0o2777 if self._group else 0o777)
            return folder
        sources = {
            "configMap": self._config_map, "secret": self._secret, "downwardAPI": self._downward,
            "projected": self._projected,
        }  # fmt: skip
        for kind, write in sources.items():
            if kind in volume:
                mode = int(volume[kind].get("defaultMode") or _MODE)
                for path, (content, own_mode) in write(volume[kind]).items():
                    self._write(folder / path, content, own_mode or mode)
                return folder
        raise NotConfigured(f"volume {volume['name']}: the lab's node has no {', '.join(volume.keys() - {'name'})}")

    def _write(self, path: Path, content: bytes, mode: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if self._group is not None:
            os.chown(path, 0, self._group)
            mode |= 0o440
        path.chmod(mode)

    def _config_map(self, source: Object) -> dict[str, tuple[bytes, int | None]]:
        return _chosen(source, self._files.config_map(source["name"], bool(source.get("optional"))))

    def _secret(self, source: Object) -> dict[str, tuple[bytes, int | None]]:
        name = source.get("secretName") or source["name"]
        return _chosen(source, self._files.secret(name, bool(source.get("optional"))))

    def _downward(self, source: Object) -> dict[str, tuple[bytes, int | None]]:
        found: dict[str, tuple[bytes, int | None]] = {}
        for item in source.get("items") or []:
            if "fieldRef" in item:
                text = self._field(item["fieldRef"]["fieldPath"])
            else:
                reference = item["resourceFieldRef"]
                named = (each for each in self._pod["spec"]["containers"] if each["name"] == reference["containerName"])
                text = resource(next(named), reference)
            found[item["path"]] = (text.encode(), item.get("mode"))
        return found

    def _field(self, path: str) -> str:
        if path in ("metadata.labels", "metadata.annotations"):
            pairs = self._pod["metadata"].get(path.split(".")[1]) or {}
            return "\n".join(f'{name}="{value}"' for name, value in sorted(pairs.items()))
        return field(self._pod, path, self._address, self._node)

    def _projected(self, source: Object) -> dict[str, tuple[bytes, int | None]]:
        found: dict[str, tuple[bytes, int | None]] = {}
        for each in source.get("sources") or []:
            if "serviceAccountToken" in each:
                found[each["serviceAccountToken"]["path"]] = (self._token(each["serviceAccountToken"]), None)
            for kind, read in (
                ("configMap", self._config_map), ("secret", self._secret), ("downwardAPI", self._downward),
            ):  # fmt: skip
                if kind in each:
                    found |= read(each[kind])
        return found

    def _token(self, source: Object) -> bytes:
        metadata = self._pod["metadata"]
        account = self._pod["spec"].get("serviceAccountName") or "default"
        bound = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
        made = self._api.create(
            f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {
                    "audiences": [source["audience"]] if source.get("audience") else [],
                    "expirationSeconds": source.get("expirationSeconds") or 3600,
                    "boundObjectRef": bound,
                },
            },
        )
        return made["status"]["token"].encode()


def _chosen(source: dict[str, Any], content: dict[str, bytes]) -> dict[str, tuple[bytes, int | None]]:
    """The keys that a volume takes, by the path each gets."""
    items = source.get("items")
    if items is None:
        return {key: (value, None) for key, value in content.items()}
    for item in items:
        if item["key"] not in content and not source.get("optional"):
            raise NotConfigured(f"references non-existent config key: {item['key']}")
    return {item["path"]: (content[item["key"]], item.get("mode")) for item in items if item["key"] in content}
