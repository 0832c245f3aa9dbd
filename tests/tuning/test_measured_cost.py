"""Energy and price of trials, from synthetic samples of a machine."""

import pytest

from paceline.run import RunFolder
from paceline.tuning.measured_cost import measure_cost

SAMPLES = """# paceline samples 1
# node: n1
time [s],cpu [%],cpu energy [J],gpu0 power [W]
1000,50,7000,36
1005,50,7100,36
1010,50,7360,36
"""


def test_cost_is_energy_of_the_node_and_price_of_the_ranks(tmp_path):
    """Of the processors 360 J, and of the GPU 36 W for 10 s."""
    run = RunFolder(tmp_path)
    assert measure_cost(run, 1800, None) == {}
    run.monitor.mkdir()
    (run.monitor / "n1.csv").write_text(SAMPLES)
    assert measure_cost(run, 1800, 2.5) == {
        "price": pytest.approx(1.25),
        "energy": pytest.approx((360 + 36 * 10) / 3.6e6),
    }
    (run.monitor / "n1.csv").write_text(SAMPLES.replace(",cpu energy [J],gpu0 power [W]", ",a,b"))
    assert measure_cost(run, 1800, None) == {}
