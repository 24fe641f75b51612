import pytest

from quire.sampling.sampler import Sampler


@pytest.fixture(scope="module", params=["kernel", "torch"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Both ways to draw: the kernel's, and the plain torch one for devices without a kernel."""
    made = Sampler("cpu")
    made._fused = request.param == "kernel"
    return made
