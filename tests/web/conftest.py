import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: needs playwright and a chromium on this machine")


@pytest.fixture(scope="session")
def models():
    from small_explorer import NAMES, small_model

    return {name: small_model(name) for name in NAMES}


@pytest.fixture(scope="session")
def examples():
    from small_explorer import noise

    from cumulant.web import Example

    return [Example(noise(seed), str(seed)) for seed in range(3)]


@pytest.fixture
def client(models, examples):
    from small_explorer import local_client

    from cumulant.web import Limits, create_app

    return local_client(create_app(models, examples, Limits(upload_bytes=200_000, pixels=1_000_000, images=3)))
