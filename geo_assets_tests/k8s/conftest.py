"""One cluster for all tests here: it takes two minutes to come up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from geo_assets_tests.k8s import deployed
from geo_assets_tests.k8s.deployed import Cluster, Kubectl


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The whole platform: control plane, node, image, real services, manifests applied and every pod ready."""
    with deployed.platform(tmp_path_factory.mktemp("lab").resolve()) as made:
        yield made


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """The real API with its controllers and scheduler, and no node: objects are judged, and no pod runs."""
    with deployed.control_plane(tmp_path_factory.mktemp("control_plane").resolve()) as made:
        yield made
