"""Settings, from the environment (`GEO_ASSETS_*`) and flags: where things are and how large they may get.

Every default has its reason beside it. What a map consists of (layers) and who may write (sources) are files of their
own in the home folder; this module only says where they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from geo_assets import addresses, references
from geo_assets.events import signature
from geo_assets.flow import budget, shedding
from geo_assets.partitions import PartitionZooms


class Settings(BaseSettings):
    """One process's settings. Frozen: a changed setting is a restarted process."""

    model_config = SettingsConfigDict(
        env_prefix="GEO_ASSETS_",
        frozen=True,
        extra="ignore",
        # `NAME=` in a file of settings says that there is none.
        env_ignore_empty=True,
        # Half of them are secrets or have one in a URL.
        hide_input_in_errors=True,
    )

    home: Path = Field(default=Path(".geo_assets"), description="Folder of all embedded data.")
    host: str = Field(
        default="127.0.0.1", description="Address the services listen on; loopback unless asked otherwise."
    )
    edge_port: int = Field(default=8787, ge=1, le=65535)
    tiles_port: int = Field(default=8788, ge=1, le=65535)
    dagster_port: int = Field(default=3000, ge=1, le=65535)
    ingest_port: int = Field(default=8789, ge=0, le=65535, description="Metrics of ingest; 0 serves none.")
    live_port: int = Field(default=8791, ge=0, le=65535, description="Metrics of the fast lane; 0 serves none.")
    public_tiles_url: str | None = Field(
        default=None, description="URL of the tile server as browsers see it; default from host and port."
    )
    public_dagster_url: str | None = Field(default=None, description="URL of the Dagster UI as browsers see it.")
    public_edge_url: str | None = Field(default=None, description="URL of the edge as senders see it.")
    forwarded_allow_ips: str = Field(
        default="127.0.0.1", description="Proxies whose X-Forwarded-* headers are believed."
    )
    # Half a minute on an idle laptop; a machine that is busy with something else takes ten times as long.
    start_timeout_s: float = Field(default=600.0, gt=0, description="Longest that `up` waits for its services.")
    # A body of 100 MB over a slow line takes longer; its sender sends it again.
    drain_s: float = Field(
        default=10.0, ge=0, le=3_600, description="How long what is under way may go on when a process is to end."
    )
    # A balancer that asks every two seconds has seen by then that /readyz says no; without one there is nothing to wait
    # for.
    shutdown_delay_s: float = Field(
        default=0.0, ge=0, le=600, description="How long edge and tile server serve on after SIGTERM, not ready."
    )
    log_level: str = Field(default="info")
    log_format: str = Field(default="auto", description="`console`, `json`, or `auto`: console on a terminal.")

    # Bodies: 100 MB is the largest collection a sender should post; above 10 MB it is streamed to the inbox.
    body_limit_bytes: int = Field(default=100_000_000, ge=1_000)
    stream_above_bytes: int = Field(default=10_000_000, ge=1_000)
    clock_tolerance_s: int = Field(default=300, description="Standard Webhooks: five minutes.")
    # A geometry that takes longer than 30 s is hostile or belongs in an import.
    task_timeout_s: float = Field(default=30.0, gt=0, le=120.0)
    max_vertices: int = Field(default=1_000_000, ge=4, description="Vertices one feature may have.")
    ingest_workers: int = Field(default=2, ge=1)
    build_workers: int = Field(default=2, ge=1, description="Processes that encode tiles in one run.")
    # A low zoom of a whole country is one tile of millions of vertices: minutes, and no fault.
    build_timeout_s: float = Field(default=900.0, gt=0, description="Longest a single tile may take to build.")
    max_attempts: int = Field(default=3, ge=1, description="Builds of a tile that may fail before it is a dead letter.")

    # The fast lane builds within milliseconds what the sensor's runs would build in seconds. One worker keeps up with
    # some hundred edits a second; more of them share the partitions of `[tiles]`.
    live_workers: int = Field(default=1, ge=0, le=64, description="Fast lane workers of `up`; 0: runs build all.")
    live_build_workers: int = Field(default=1, ge=1, description="Processes of one lane worker for heavy tiles.")
    # Edits of one moment that touch one tile are one build; nobody sees five milliseconds.
    live_coalesce_ms: float = Field(default=5.0, ge=0, le=1_000, description="How long hints gather before a build.")

    # Backpressure (docs/backpressure.md). A vertex costs 1.5 µs to encode: 60,000 are a tenth of a second of one core.
    vertex_budget: int = Field(default=60_000, ge=4_000, description="Vertices of the tiles that are built at once.")
    # 15 ms of encoding, a tile of zoom 15 in a dense city. A quarter of the budget is kept for such tiles.
    small_vertices: int = Field(
        default=10_000, ge=1, description="Most vertices of a small tile, which waits for no large one."
    )
    # A dense tile takes 50 ms to encode: at ten hints a second it would have half a core for itself.
    hot_tile_rate: float = Field(
        default=10.0, ge=0, description="Hints a second from which a tile's hints go to [tiles-hot]; 0: never."
    )
    # None: what a record tells is not for us to call worthless. Positions alone may be declared.
    shed_topics: str = Field(
        default="",
        description="Topics whose records newer ones make worthless: they may be shed. `positions`, or none.",
    )
    # Longer than a broker's restart takes, which needs no shedding.
    shed_after_s: float = Field(default=30.0, ge=1, description="How long reading must pause before anything is shed.")

    # What was encoded of a tile takes some 300 bytes a feature: this holds a thousand tiles of a thousand features.
    encoded_cache_mb: int = Field(default=256, ge=0, description="Encoded features that a fast lane worker keeps, MB.")

    # Retention: the guard and the tombstones outlive the log twice, so that no replay finds them gone.
    retention_s: int = Field(default=7 * 24 * 3600, ge=60)
    log_partitions: int = Field(default=4, ge=1, le=256)

    manifest_cap: int = Field(
        default=20_000, ge=1, description="Tiles a backfill may touch without an explicit override."
    )
    plan_timeout_s: float = Field(
        default=300.0, gt=0, description="Longest that a region's tiles may take to plan; a simpler shape takes less."
    )
    edit_cap: int = Field(default=2_000, ge=1, description="Tiles one edit marks at once; the rest becomes a manifest.")
    confirm_above: int = Field(default=2_000, ge=0, description="Tiles above which the command line asks.")
    coverage_floor: float = Field(default=0.995, ge=0, le=1)
    # An edit is on the map within seconds; a quarter of an hour is a fault, and a long run before it is none.
    freshness_limit_s: float = Field(default=900.0, gt=0, description="Longest that a tile may wait for an edit.")
    dead_letter_rate: float = Field(default=0.01, ge=0, le=1)

    batch_tiles: int = Field(
        default=2_500, ge=1, description="Most tiles of one run: a run costs 2-4 s before its first tile."
    )
    runs_in_flight: int = Field(default=2, ge=1, description="Runs requested and not ended.")
    # A run over a batch takes minutes: after half an hour without a slot somebody lowered the pool's limit and forgot
    # it, or something holds all of it. An error says so before people notice that the map stands still.
    pool_wait_s: float = Field(
        default=1_800.0, gt=0, description="Longest that a batch's run may wait in Dagster's queue for its pool's slot."
    )
    # Where a run is a process of `up`, all runs share one machine; where it is a pod, its memory is reserved before it
    # starts, by what its batch needs (docs/kubernetes.md).
    run_pods: bool = Field(default=False, description="Whether each run is a pod of its own, sized by its batch.")
    # A tile of eight million vertices; the largest low zoom of a country has a few.
    run_pod_most_mb: int = Field(default=8_192, ge=1_024, description="Most memory that a run's pod may ask for, MB.")
    run_pod_account: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        description="Service account of the pods that build tiles; default: the run launcher's.",
    )
    lease_s: float = Field(default=120.0, gt=0, description="A batch's lease; renewed every tick while its run lives.")
    garbage_grace_s: float = Field(
        default=600.0, ge=0, description="How long an object that is no longer current is kept."
    )

    # -- retention of Dagster's storages -------------------------------------------------------------------------------
    # The newest entry of a partition stays for good; these are the ones behind it. A week to look into a run's log, two
    # to compare a tile with what it was, a month of runs.
    keep_steps_s: float = Field(default=7 * 24 * 3600.0, ge=60, description="What a run logged is kept, after its end.")
    keep_history_s: float = Field(
        default=14 * 24 * 3600.0, ge=60, description="Superseded materializations and old check results are kept."
    )
    keep_runs_s: float = Field(default=30 * 24 * 3600.0, ge=60, description="Runs that ended are kept.")
    # At night, when the fewest wait. At hundreds of commits a second, hour by hour: `@hourly`.
    maintenance_cron: str = Field(
        default="23 3 * * *", description="When the job `maintenance` runs, in UTC; `off`: only by hand."
    )
    # Each zoom has four times the tiles of the one before. Dagster's UI answers within seconds up to some 100,000.
    partition_zooms: str = Field(
        default="all",
        description="Zooms at which a tile is a partition of its own, such as `0,6,10,14`; 0 always is one.",
    )
    image_digest: str = Field(
        default="local", description="Digest of the image a process runs from; in every tile's metadata."
    )
    # An image refuses: what it was built with is what it runs with. Where somebody installed by hand, a line is enough.
    library_check: Literal["refuse", "warn"] = Field(
        default="warn", description="Where GEOS, PROJ, its database or a grid is not what native.lock names."
    )

    # Dagster ends what runs for two hours; a run that ends by itself before that hands over to the next in good order.
    geofence_run_s: float = Field(default=3_600.0, gt=0, description="Longest that one routing run goes on.")
    # Starting one costs some seconds: it stays for half a minute after the last position.
    geofence_idle_s: float = Field(default=30.0, gt=0, description="Without a position for so long a run ends.")
    # What a killed run tells again, under the same keys; written as rarely as a tenth of the time goes into it.
    geofence_snapshot_s: float = Field(default=5.0, ge=0.1, description="Between snapshots of a routing run.")
    # A run that is only held up for so long is overtaken; its epoch keeps what it still sends from counting.
    geofence_lease_s: float = Field(
        default=5.0, ge=1, le=300, description="Longest that positions wait for the next run when one is killed."
    )
    geofence_lateness_s: float = Field(
        default=5.0, ge=0, le=86_400, description="How long DWELL waits for a silent device's late positions."
    )
    # A hundred bytes each; beyond it the records of new devices are dead letters until others are silent for a week.
    geofence_max_devices: int = Field(
        default=2_000_000, ge=1, le=100_000_000, description="Devices that the routing run remembers."
    )
    geofence_crossings: bool = Field(
        default=False, description="Whether a fence passed between two fixes gives ENTER and EXIT."
    )

    # A Dagster run is gone before anybody asks, and the next one overlaps with it: none unless somebody wants it. Where
    # the port is taken (a run that stands by on the same machine, say) a free one is used, which the run's log names.
    geofence_metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of a routing run's metrics; 0: a free one; none by default."
    )

    # The map page. A position is personal data, and whoever can open the page can read what it shows: without a word, a
    # server that only its own machine reaches shows devices and takes fences, any other does neither.
    device_view: bool | None = Field(
        default=None, description="Whether the tile server shows devices and triggers. Default: on loopback alone."
    )
    draw_fences: bool | None = Field(
        default=None, description="Whether fences may be drawn on the map page. Default: on loopback alone."
    )
    # The one source of a new home, so that what it was given can be changed on the page too.
    draw_source: str = Field(
        default="demo",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Source of fences that are drawn on the map page; only its fences can be changed there.",
    )

    # -- which adapters ------------------------------------------------------------------------------------------------
    # A port whose setting is absent uses its embedded adapter, so that one service can be tried at a time. `production`
    # says that none may be absent: a forgotten URL must not become a SQLite file in a pod.
    stack: Literal["embedded", "production"] = Field(
        default="embedded", description="`production`: Kafka, Redis, PostGIS, Postgres and S3 must all be named."
    )

    kafka_servers: str | None = Field(default=None, description="Bootstrap servers, `host:port,host:port`.")
    kafka_topic_prefix: str = Field(default="", description="Before every topic and group, on a shared cluster.")
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(default="PLAINTEXT")
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "AWS_MSK_IAM"] = Field(
        default="SCRAM-SHA-512", description="AWS_MSK_IAM: no user and password, but tokens of this process's AWS role."
    )
    kafka_sasl_username: str | None = Field(default=None)
    kafka_sasl_password: SecretStr | None = Field(default=None)
    kafka_ssl_ca: Path | None = Field(default=None, description="PEM file of the authority that signed the brokers.")
    kafka_ssl_certificate: Path | None = Field(default=None, description="PEM file of this client's certificate.")
    kafka_ssl_key: Path | None = Field(default=None, description="PEM file of this client's key.")
    # Three copies where there are three brokers, of which two must have a record before it is acknowledged.
    kafka_replication_factor: int | None = Field(default=None, ge=1, description="Default: 3, or as many as brokers.")
    kafka_min_insync_replicas: int | None = Field(default=None, ge=1, description="Default: 2 of 3, else 1.")
    offset_out_of_range: Literal["stop", "reset"] = Field(
        default="reset",
        description="When retention took records nobody had read: stop loudly, or go on and repair the coverage.",
    )

    redis_url: SecretStr | None = Field(default=None, description="redis:// or rediss://, with password.")
    redis_ssl_ca: Path | None = Field(
        default=None, description="PEM file of the authority that signed the server; default: the system's."
    )
    redis_prefix: str = Field(default="geo_assets:", description="Before every key, on a shared server.")

    postgres_url: SecretStr | None = Field(
        default=None, description="postgresql://…: feature store (PostGIS), ledger and Dagster's storage."
    )
    feature_store_url: SecretStr | None = Field(default=None, description="Default: postgres_url.")
    ledger_url: SecretStr | None = Field(default=None, description="Default: postgres_url.")
    dagster_postgres_url: SecretStr | None = Field(default=None, description="Default: postgres_url.")
    postgres_schema: str = Field(
        default="geo_assets",
        pattern=r"^[a-z_][a-z0-9_]{0,40}$",
        description="Schema of both; Dagster's ends in `_dagster`.",
    )
    # Of all Postgres URLs that name no sslmode of their own.
    postgres_ssl_ca: Path | None = Field(
        default=None, description="PEM file of the authority that signed the server: with it sslmode is verify-full."
    )
    postgres_auth: Literal["password", "aws-iam"] = Field(
        default="password", description="aws-iam: each new connection to RDS has a token of this process's AWS role."
    )
    # One process's connections: the pipelines hold one each and are few; 100 is Postgres' own limit for all of them.
    postgres_pool: int = Field(default=4, ge=1, le=100)
    engine: Literal["numpy", "st_asmvt"] = Field(default="numpy", description="Who encodes: ours, or PostGIS.")

    tile_store_url: str | None = Field(default=None, description="s3://bucket/prefix or gs://bucket/prefix.")
    s3_endpoint: str | None = Field(default=None, description="Of R2, SeaweedFS, MinIO; AWS needs none.")
    s3_region: str | None = Field(default=None)
    s3_profile: str | None = Field(default=None, description="Profile of the AWS configuration files.")
    # Of MSK and RDS tokens and of secrets; the bucket may be elsewhere.
    aws_region: str | None = Field(default=None, description="Default: as the AWS command line finds it.")
    tile_store_role: str | None = Field(
        default=None, description="ARN that a run assumes, narrowed to write below its tileset's prefix only."
    )
    sts_endpoint: str | None = Field(default=None, description="Where roles are assumed; default: s3_endpoint.")

    purge_urls: str | None = Field(
        default=None,
        repr=False,  # A cache may ask for a password.
        description="Caches in front of the tile server, comma separated: http://cache:6081",
    )
    # A cache may have fetched the old bytes between the commit and the purge; nothing takes longer than its fetch.
    purge_again_s: float = Field(default=10.0, ge=0)

    # Who is told when a check fails; without an address each alert is a line of the log.
    alert_webhook_urls: SecretStr | None = Field(
        default=None, description="Webhooks that take alerts, comma separated: https://hooks.slack.com/services/…"
    )
    alert_format: Literal["auto", "slack", "alertmanager", "json"] = Field(
        default="auto", description="Shape of their bodies; `auto` goes by the address."
    )
    alert_webhook_secret: SecretStr | None = Field(
        default=None, description="Signs each body as Standard Webhooks do: whsec_ and base64, or 16 characters."
    )

    # Traces: with an address, or OpenTelemetry's own OTEL_EXPORTER_OTLP_ENDPOINT, they are on (docs/operations.md).
    otlp_endpoint: str | None = Field(
        default=None, description="Collector of traces, OTLP over HTTP: http://collector:4318"
    )
    # Who turns traces on wants to see the next edit. An edit of one building makes some twenty spans.
    trace_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of edits that are traced; a caller that traces decides for its own."
    )

    sources_file: Path | None = Field(
        default=None, description="YAML with the sources; default `sources.yaml` in the home folder."
    )
    layers_file: Path | None = Field(
        default=None, description="YAML with the layers; default `layers.yaml` in the home folder."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, given: Any) -> Any:
        """Blanks alone count as not set, and blanks around an address as a slip of whoever wrote the file."""
        if not isinstance(given, dict):
            return given
        kept: dict[str, Any] = {}
        for name, value in given.items():
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            field = cls.model_fields.get(name)
            if field is not None and isinstance(text, str):
                # An empty text as an argument, not from the environment, is meant where a text may be empty.
                if not text.strip() and (text or field.default is None):
                    continue
                if name in addresses.KINDS:
                    value = text.strip()
            kept[name] = value
        return references.filled_in(kept)

    # Of the whole and not of a field: pydantic hands a field's input on to whoever prints its error.
    @model_validator(mode="after")
    def _addresses(self) -> Settings:
        faults: list[str] = []
        for name, kind in addresses.KINDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                addresses.places(kind, value.get_secret_value() if isinstance(value, SecretStr) else value)
            except addresses.AddressError as fault:
                faults.append(f"GEO_ASSETS_{name.upper()} {fault}")
        if faults:
            raise ValueError(". ".join(faults))
        return self

    @model_validator(mode="after")
    def _alerts_can_be_signed(self) -> Settings:
        if self.alert_webhook_secret is not None:
            try:
                signature.secret_key(self.alert_webhook_secret.get_secret_value())
            except signature.SecretError as fault:
                raise ValueError(f"GEO_ASSETS_ALERT_WEBHOOK_SECRET: {fault}") from None
        return self

    @model_validator(mode="after")
    def _tokens_are_encrypted(self) -> Settings:
        # Without SASL the mechanism would be passed over in silence, and the broker would answer nothing.
        if self.kafka_sasl_mechanism == "AWS_MSK_IAM" and self.kafka_security_protocol != "SASL_SSL":
            raise ValueError(
                "GEO_ASSETS_KAFKA_SASL_MECHANISM=AWS_MSK_IAM needs GEO_ASSETS_KAFKA_SECURITY_PROTOCOL=SASL_SSL"
            )
        return self

    @model_validator(mode="after")
    def _complete(self) -> Settings:
        if self.stack == "production":
            for name in ("kafka_servers", "redis_url", "postgres_url", "tile_store_url"):
                two = name == "postgres_url" and self.feature_store_url is not None and self.ledger_url is not None
                if getattr(self, name) is None and not two:
                    raise ValueError(f"the production stack needs GEO_ASSETS_{name.upper()}, which is not set")
        return self

    @property
    def is_private(self) -> bool:
        """Whether this machine alone reaches the services: they listen on loopback, and no public URL is named."""
        urls = (self.public_tiles_url, self.public_edge_url)
        return addresses.is_loopback(self.host) and all(
            url is None or addresses.is_loopback(urlsplit(url).hostname or "") for url in urls
        )

    @property
    def shows_devices(self) -> bool:
        """Whether the tile server shows devices and triggers."""
        return self.is_private if self.device_view is None else self.device_view

    @property
    def takes_fences(self) -> bool:
        """Whether the tile server takes fences that are drawn on its page."""
        return self.is_private if self.draw_fences is None else self.draw_fences

    @field_validator("shed_topics")
    @classmethod
    def _shed_topics(cls, text: str) -> str:
        return ",".join(sorted(shedding.declared(text)))

    @model_validator(mode="after")
    def _budget(self) -> Settings:
        kept = int(self.vertex_budget * budget.KEPT)
        if self.small_vertices > kept:
            raise ValueError(
                f"GEO_ASSETS_SMALL_VERTICES {self.small_vertices} is above {kept}, the quarter of "
                f"GEO_ASSETS_VERTEX_BUDGET {self.vertex_budget} that is kept for small tiles"
            )
        return self

    @field_validator("partition_zooms")
    @classmethod
    def _partition_zooms(cls, text: str) -> str:
        return str(PartitionZooms.parse(text))

    @property
    def partitions(self) -> PartitionZooms:
        """The zooms at which a tile is a partition of its own."""
        return PartitionZooms.parse(self.partition_zooms)

    @property
    def tiles_url(self) -> str:
        """Where browsers find the tile server, without a slash at the end."""
        return (self.public_tiles_url or f"http://{self.host}:{self.tiles_port}").rstrip("/")

    @property
    def dagster_url(self) -> str:
        """Where browsers find the Dagster UI, without a slash at the end."""
        return (self.public_dagster_url or f"http://{self.host}:{self.dagster_port}").rstrip("/")

    @property
    def edge_url(self) -> str:
        """Where senders find the edge, without a slash at the end."""
        return (self.public_edge_url or f"http://{self.host}:{self.edge_port}").rstrip("/")
