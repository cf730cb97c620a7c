"""Kafka, Redis, Postgres with PostGIS, S3 and an HTTP cache, real ones, on loopback and free ports.

Needs nothing but the standard library, so that a bare `python3` can start them. In tests:

    services = Services(folder)
    services.start("kafka")
    services.settings()["GEO_ASSETS_KAFKA_SERVERS"]
    services.kill("kafka")      # kill -9
    services.start("kafka")     # the same port, the same data
    services.remove()           # stopped, and its data gone
"""

from scripts.local_services.faults import MissingProgram, NotReady, PortTaken, ServiceFault, UnknownService
from scripts.local_services.services import CACHE, STANDARD, Services, Status, default_folder

__all__ = [
    "CACHE",
    "STANDARD",
    "MissingProgram",
    "NotReady",
    "PortTaken",
    "ServiceFault",
    "Services",
    "Status",
    "UnknownService",
    "default_folder",
]
