"""paceline preflight: would a training begin, fit and end? Asked before it is queued."""

from typing import Annotated

from typer import Exit, Option

from paceline.cli.plan_options import Json
from paceline.cli.request_options import TrainingRequest, requesting
from paceline.cli.submit import SiteFile, Time


@requesting
def preflight(
    request: TrainingRequest,
    time: Time = None,
    site: SiteFile = None,
    cluster: Annotated[
        str | None,
        Option(
            help="Where it will run: a cluster.json, or DEVICE:DEVICES_OF_A_NODExNODES@GB/s. Default: nodes like this one."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Look at a training before it is queued: site file and Slurm, task and data, the plan built, memory, room and time."""
    from paceline.cli.plan_options import check_outputs, show
    from paceline.preflight.checks import CHECKS
    from paceline.preflight.context import PreflightContext
    from paceline.preflight.finding import findings
    from paceline.preflight.text import as_json, table, verdict

    check_outputs(json, None)
    found = list(findings(PreflightContext(*request, time, site, cluster), CHECKS))
    if json is not None:
        from paceline.files import write_whole

        write_whole(json, as_json(found))
    show(table(found), verdict(found))
    if any(one.verdict == "fails" for one in found):
        raise Exit(2)
