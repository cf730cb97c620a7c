"""The environment, command and downward values of a container, resolved as a kubelet resolves them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from math import ceil

from deploy.lab.node.api import Api, Object, Refused
from deploy.lab.node.quantities import amount

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.\-]*)\))")
_NAMED = re.compile(r"(metadata\.(?:labels|annotations))\['([^']+)'\]")


class NotConfigured(Exception):
    """Something that a container names is not there; it waits, and is tried again."""


def expand(text: str, values: dict[str, str]) -> str:
    """Replace `$(NAME)` by its value; `$$(NAME)` stays as `$(NAME)`, and so does a name that is not known."""

    def replaced(found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return values.get(found[2], found[0])

    return _REFERENCE.sub(replaced, text)


def field(pod: Object, path: str, address: str, node: str) -> str:
    """A field of the pod that the downward API hands out.

    Args:
        pod: The pod.
        path: As `fieldRef` names it.
        address: Where the pod may listen: its address of loopback.
        node: The node's name.

    Raises:
        NotConfigured: the downward API has no such field.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    if named := _NAMED.fullmatch(path):
        return (metadata.get(named[1].split(".")[1]) or {}).get(named[2], "")
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": node,
        "spec.serviceAccountName": spec.get("serviceAccountName") or "default",
        "status.hostIP": "127.0.0.1",
        "status.podIP": address,
        "status.podIPs": address,
    }
    if path not in values:
        raise NotConfigured(f"the downward API has no field {path}")
    return values[path]


def resource(container: Object, reference: Object) -> str:
    """A limit or request of the container, in the divisor asked for."""
    part, name = reference["resource"].split(".", 1)
    resources = container.get("resources") or {}
    found = (resources.get(part) or {}).get(name) or (resources.get("limits") or {}).get(name) or "0"
    divisor = amount(reference.get("divisor") or "1") or amount("1")
    return str(ceil(amount(found) / divisor))


class Files:
    """Reads ConfigMaps and Secrets of a namespace.

    Args:
        api: The API server.
        namespace: The pod's.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace

    def config_map(self, name: str, optional: bool = False) -> dict[str, bytes]:
        """The contents by key; nothing where it is optional and not there."""
        found = self._read("configmaps", "configmap", name, optional)
        data = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        return data | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}

    def secret(self, name: str, optional: bool = False) -> dict[str, bytes]:
        """The contents by key; nothing where it is optional and not there."""
        found = self._read("secrets", "secret", name, optional)
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    def _read(self, collection: str, kind: str, name: str, optional: bool) -> Object:
        try:
            return self._api.get(f"/api/v1/namespaces/{self._namespace}/{collection}/{name}")
        except Refused as fault:
            if fault.status != 404:
                raise
            if optional:
                return {}
            raise NotConfigured(f'{kind} "{name}" not found') from fault


def environment(
    pod: Object, container: Object, files: Files, given: dict[str, str], address: str, node: str
) -> dict[str, str]:
    """All variables of a container.

    Args:
        pod: The pod.
        container: Its container.
        files: Where ConfigMaps and Secrets are read.
        given: What the node itself sets: the image's variables, the API server's address, service links.
        address: Where the pod may listen.
        node: The node's name.

    Raises:
        NotConfigured: a ConfigMap, Secret, key or field is not there.
    """
    values = dict(given)
    for source in container.get("envFrom") or []:
        prefix = source.get("prefix") or ""
        for kind, read in (("configMapRef", files.config_map), ("secretRef", files.secret)):
            if reference := source.get(kind):
                found = read(reference["name"], bool(reference.get("optional")))
                values |= {prefix + key: value.decode() for key, value in found.items()}
    for variable in container.get("env") or []:
        origin = variable.get("valueFrom")
        if origin is None:
            values[variable["name"]] = expand(variable.get("value") or "", values)
        elif "fieldRef" in origin:
            values[variable["name"]] = field(pod, origin["fieldRef"]["fieldPath"], address, node)
        elif "resourceFieldRef" in origin:
            values[variable["name"]] = resource(container, origin["resourceFieldRef"])
        elif "configMapKeyRef" in origin:
            _take(values, variable["name"], origin["configMapKeyRef"], files.config_map, "ConfigMap")
        elif "secretKeyRef" in origin:
            _take(values, variable["name"], origin["secretKeyRef"], files.secret, "Secret")
    return values


def _take(
    values: dict[str, str], name: str, reference: Object, read: Callable[[str, bool], dict[str, bytes]], kind: str
) -> None:
    optional = bool(reference.get("optional"))
    found = read(reference["name"], optional)
    if reference["key"] in found:
        values[name] = found[reference["key"]].decode()
    elif not optional:
        raise NotConfigured(f"couldn't find key {reference['key']} in {kind} {reference['name']}")


def service_links(services: list[Object], namespace: str) -> dict[str, str]:
    """The variables that tell a pod of the services of its namespace, in the form that Docker once had."""
    from deploy.lab.network import local

    found: dict[str, str] = {}
    for service in services:
        spec, metadata = service["spec"], service["metadata"]
        address, ports = spec.get("clusterIP"), spec.get("ports") or []
        if metadata["namespace"] != namespace or not address or address == "None" or not ports:
            continue
        name, host = metadata["name"].upper().replace("-", "_"), local(address)
        found |= {f"{name}_SERVICE_HOST": host, f"{name}_SERVICE_PORT": str(ports[0]["port"])}
        found[f"{name}_PORT"] = f"tcp://{host}:{ports[0]['port']}"
    return found
