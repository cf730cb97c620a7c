"""The command line of `deploy/lab/lab`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.lab.binary import binary, build
from deploy.lab.cluster import CONTROL_PLANE, NODE, Lab, default_folder
from deploy.lab.faults import LabFault

_NOT_RUNNING = 3
"""Exit code of `status` when something does not run, as init scripts have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a fault is one line on standard error."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(Lab(asked.state), asked)
    except LabFault as fault:
        print(fault, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(lab: Lab, asked: argparse.Namespace) -> int:
    if asked.command == "build":
        print(build())
    elif asked.command == "built":
        return 0 if binary().exists() else _NOT_RUNNING
    elif asked.command == "up":
        begun = time.monotonic()
        lab.up(node=not asked.no_node, cpu=asked.cpu, memory=asked.memory)
        _show(lab)
        print(f"{time.monotonic() - begun:.1f} s; KUBECONFIG={lab.kubeconfig}")
    elif asked.command == "image":
        lab.add_image(asked.name, asked.rootfs.resolve(), json.loads(asked.config.read_text()) if asked.config else {})
    elif asked.command == "kubectl":
        os.execv(lab.binary, lab.kubectl_command(*asked.arguments))
    elif asked.command == "exec":
        found = lab.kubectl(
            "get", "pod", asked.pod, "-n", asked.namespace, "-o", "jsonpath={.metadata.uid}/{.spec.containers[0].name}"
        )
        if found.returncode:
            raise LabFault(found.stderr.strip())
        container = found.stdout.replace("/", ".")
        return subprocess.run(
            ["runc", "--root", str(lab.folder / NODE / "runc"), "exec", container, *asked.arguments], check=False
        ).returncode
    elif asked.command == "start":
        for name in asked.names:
            lab.start(name)
    elif asked.command == "stop":
        for name in asked.names:
            lab.stop(name, hard=asked.hard)
    elif asked.command == "down":
        lab.down()
    else:
        _show(lab)
        return 0 if all(lab.running().values()) else _NOT_RUNNING
    return 0


def _show(lab: Lab) -> None:
    state = lab.state()
    for name, process in lab.running().items():
        port = state.ports[name] if state else 0
        print(
            f"{name:12} {'running' if process else 'stopped':8} "
            + (f"127.0.0.1:{port}  pid {process.pid}" if process else "")
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deploy/lab/lab",
        description="A real Kubernetes control plane and a stand-in node, on loopback and free ports.",
    )
    parser.add_argument("--state", type=Path, default=default_folder(), help="the lab's folder; %(default)s")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        # Before or after the command, as people write it.
        made.add_argument("--state", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return made

    command("build", "build the control plane's binary unless the cache has it (Go 1.26, ten minutes)")
    command("built", "exit code 0 when the cache has the control plane's binary, else 3")
    up = command("up", "start what does not run, and wait until it is ready")
    up.add_argument("--no-node", action="store_true", help="the control plane alone; needs no root")
    up.add_argument("--cpu", default="8", help="processors that the node says it has; %(default)s")
    up.add_argument("--memory", default="16Gi", help="memory that the node says it has; %(default)s")
    image = command("image", "tell the node where an image is unpacked")
    image.add_argument("name")
    image.add_argument("rootfs", type=Path)
    image.add_argument("--config", type=Path, help="its configuration as JSON: Env, User, WorkingDir, Entrypoint, Cmd")
    command("status", "say what runs; exit code 3 when something does not")
    kubectl = command("kubectl", "the real kubectl, as the administrator")
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    run = command("exec", "run a command in a pod's first container")
    run.add_argument("-n", "--namespace", default="geo-assets")
    run.add_argument("pod")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    for name, text in (("start", "start one process again, on its port"), ("stop", "end one process")):
        made = command(name, text)
        made.add_argument("names", nargs="+", choices=[*CONTROL_PLANE, NODE], metavar="NAME")
        if name == "stop":
            made.add_argument("--hard", action="store_true", help="kill -9")
    command("down", "end everything that was started, and delete its data")
    return parser
