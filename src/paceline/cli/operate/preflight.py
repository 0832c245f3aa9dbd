"""paceline preflight: check whether a training would start, fit and finish, before it is queued."""

from typing import Annotated

from typer import Exit, Option

from paceline.cli.operate.submit import SiteFile, Time
from paceline.cli.options.request_options import Json, TrainingRequest, with_request_options


@with_request_options
def preflight(
    request: TrainingRequest,
    time: Time = None,
    site: SiteFile = None,
    cluster: Annotated[
        str | None,
        Option(
            help="Machine to check for: a cluster.json, or DEVICE:DEVICES_PER_NODExNODES@GB/s [default: "
            "nodes like this one]"
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Check a training before it is queued, from the site file to memory and disk space.

    Checks the site file and Slurm's limits, the task and its data, the plan, memory, disk space and time.
    Exit status: 0 no check failed, 2 a check failed, or bad input.
    """
    from paceline.cli.options.plan_options import check_outputs, print_parts
    from paceline.preflight.checks import CHECKS
    from paceline.preflight.context import PreflightContext
    from paceline.preflight.finding import run_checks
    from paceline.preflight.text import build_summary, build_table, to_json

    check_outputs(json, None)
    findings = list(run_checks(PreflightContext(*request, time, site, cluster), CHECKS))
    if json is not None:
        from paceline.files import write_whole

        write_whole(json, to_json(findings))
    print_parts(build_table(findings), build_summary(findings))
    if any(finding.verdict == "fails" for finding in findings):
        raise Exit(2)
