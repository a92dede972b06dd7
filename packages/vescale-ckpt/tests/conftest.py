"""Places that are no directories."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture
def memory_bucket() -> Iterator[str]:
    """The URL of a place in this process's memory, empty again after the test."""
    yield "memory://bucket"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """Start an S3 server and return the environment in which it is found.

    It is one for all tests: ranks go on using the connection that they have once made.
    """
    # Here, so that the tests of GPUs run where there is none of it.
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()
