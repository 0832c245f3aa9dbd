"""The options of a training request, as types of parameters."""

from typing import Annotated

from typer import Option

from paceline.optimizer_options import OPTIMIZERS

OPTIMIZER_HELP = f"Optimizer: {', '.join(OPTIMIZERS)} [default: adamw]"
# panels of the help page
RANKS, TRAINING, NUMERICS, RUN = "Ranks", "Training", "Numerics", "Run"

Ranks = Annotated[
    int | None, Option(help="Number of processes [default: one per GPU, or 1]", rich_help_panel=RANKS)
]
Nodes = Annotated[
    str | None,
    Option(
        help="Number of nodes of the Slurm allocation or Ray cluster; ranks are spread evenly over them. "
        "2:4 (Slurm) starts on 4 nodes and continues on as few as 2 when nodes are lost [default: 1]",
        rich_help_panel=RANKS,
    ),
]
RanksPerNode = Annotated[
    int | None, Option(help="Number of processes per node, instead of --ranks.", rich_help_panel=RANKS)
]
Launcher = Annotated[
    str | None,
    Option(
        help="Launcher of the ranks: local, slurm (inside an allocation) or ray "
        "[default: slurm with several --nodes, else local]",
        rich_help_panel=RANKS,
    ),
]
PlanText = Annotated[
    str | None,
    Option(
        help="Plan by name: single, ddp, zero1, zero2, zero3, hsdp, local-sgd, post-local-sgd, "
        "parameter-server; by keys: "
        "tp=2 or pp=2,microbatches=8 or dp=2,tp=2,pp=2,zero=2; or auto, the fastest "
        "plan that fits "
        "[default: single on one rank, else ddp]",
        rich_help_panel=RANKS,
    ),
]
Batch = Annotated[
    int | None,
    Option(
        help="Number of samples of the global batch, over all ranks [default: 64]",
        rich_help_panel=TRAINING,
    ),
]
Epochs = Annotated[
    float | None, Option(help="Length of the training in epochs [default: 20]", rich_help_panel=TRAINING)
]
Steps = Annotated[
    int | None,
    Option(help="Length of the training in steps, instead of --epochs.", rich_help_panel=TRAINING),
]
Patience = Annotated[
    int | None,
    Option(
        help="End after this many evaluations in a row without a better metric; the metric is that of "
        "stop.metric, or of save.best [default: train to the length]",
        rich_help_panel=TRAINING,
    ),
]
LearningRate = Annotated[
    float | None, Option(help="Learning rate [default: 0.001]", rich_help_panel=TRAINING)
]
Seed = Annotated[
    int | None,
    Option(help="Seed of weights, sample order and dropout [default: 0]", rich_help_panel=TRAINING),
]
Set = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=VALUE",
        help="Set a field of the task, or a dotted key of the request such as optimizer.momentum; may "
        "be repeated. "
        "--keys lists all names.",
        rich_help_panel=TRAINING,
    ),
]
OptimizerName = Annotated[str | None, Option(help=OPTIMIZER_HELP, rich_help_panel=TRAINING)]
ScheduleName = Annotated[
    str | None,
    Option(
        help="Learning rate schedule: constant, cosine, cosine-restarts, linear, polynomial, step, "
        "milestones, one-cycle, wsd, inverse-sqrt, plateau or task [default: constant]",
        rich_help_panel=TRAINING,
    ),
]
Clip = Annotated[
    float | None,
    Option(
        help="Maximum norm of the gradient of all parameters [default: no clipping]",
        rich_help_panel=TRAINING,
    ),
]
Precision = Annotated[
    str | None,
    Option(
        help="Precision of the computation: fp64, fp32, tf32, bf16, fp16, or auto, what this machine "
        "does well [default: fp32]",
        rich_help_panel=NUMERICS,
    ),
]
Compile = Annotated[
    bool | None,
    Option(
        "--compile/--no-compile",
        help="Compile the model's blocks with torch.compile.",
        rich_help_panel=NUMERICS,
    ),
]
Tf32 = Annotated[
    bool | None,
    Option(
        "--tf32/--no-tf32",
        help="Allow CUDA to round the inputs of float32 matrix products to TF32.",
        rich_help_panel=NUMERICS,
    ),
]
BatchNorm = Annotated[
    str | None,
    Option(
        help="BatchNorm statistics: over the samples of all ranks (global) or of each rank (local) "
        "[default: global]",
        rich_help_panel=NUMERICS,
    ),
]
AllowLocalLoss = Annotated[
    bool | None,
    Option(
        "--allow-local-loss",
        help="Accept a loss that mixes samples; each part of a divided batch then has a separate loss.",
        rich_help_panel=NUMERICS,
    ),
]
SaveEvery = Annotated[
    int | None,
    Option(
        help="Number of steps between checkpoints [default: by time, every 10 minutes]",
        rich_help_panel=RUN,
    ),
]
Keep = Annotated[
    int | None,
    Option(help="Number of recent checkpoints to keep, besides the best [default: 2]", rich_help_panel=RUN),
]
MaxTime = Annotated[
    str | None,
    Option(
        help="Wall time after which the training saves and stops, such as 90m or 1h30m; paceline resume "
        "continues [default: no limit]",
        rich_help_panel=RUN,
    ),
]
Workers = Annotated[
    int | None,
    Option(
        help="Number of data loading processes per rank [default: spare cores on a machine with GPUs, "
        "else 0]",
        rich_help_panel=RUN,
    ),
]
Profile = Annotated[
    bool | None,
    Option(
        "--profile/--no-profile",
        help="Profile some steps [default: if it takes less than 1 % of the time]",
        rich_help_panel=RUN,
    ),
]
Report = Annotated[
    bool | None,
    Option(
        "--report/--no-report",
        help="Write report.html into the run folder at the end [default: --report]",
        rich_help_panel=RUN,
    ),
]
Monitor = Annotated[
    str | None,
    Option(
        "--monitor",
        "--monitor-every",
        metavar="SECONDS|off",
        help="Seconds between samples of the processors, memory, disks, network and GPUs of each node, "
        "or off; torchrun accepts only the longer name [default: 1]",
        rich_help_panel=RUN,
    ),
]
Trace = Annotated[
    str | None,
    Option(
        metavar="FIRST:LAST",
        help="Trace these steps, such as 20:25: what each rank does when, for Perfetto [default: none]",
        rich_help_panel=RUN,
    ),
]
Histograms = Annotated[
    int | None,
    Option(
        help="Number of steps between histograms of weights, gradients and activations for TensorBoard "
        "[default: none]",
        rich_help_panel=RUN,
    ),
]
NoiseScale = Annotated[
    int | None,
    Option(
        help="Number of steps between measurements of the gradient noise scale, the batch up to which "
        "larger batches save steps [default: none]",
        rich_help_panel=RUN,
    ),
]
Graph = Annotated[
    bool | None,
    Option(
        "--graph/--no-graph",
        help="Write the graph of the model for TensorBoard [default: --no-graph]",
        rich_help_panel=RUN,
    ),
]
MlflowUri = Annotated[
    str | None,
    Option(
        metavar="URI",
        help="Send the run to MLflow: http://HOST:5000, or sqlite:////PATH.db [default: none]",
        rich_help_panel=RUN,
    ),
]
Nvtx = Annotated[
    bool | None,
    Option(
        "--nvtx/--no-nvtx",
        help="Mark steps, phases, micro-batches and blocks with NVTX ranges, for Nsight Systems "
        "[default: --no-nvtx]",
        rich_help_panel=RUN,
    ),
]
Nsys = Annotated[
    bool | None,
    Option(
        "--nsys/--no-nsys",
        help="Start each rank under Nsight Systems, with --nvtx; reports: RUN/nsys [default: --no-nsys]",
        rich_help_panel=RUN,
    ),
]
Device = Annotated[
    str | None, Option(help="Device: cpu or cuda [default: cuda if available]", rich_help_panel=RANKS)
]
Restarts = Annotated[
    int | None,
    Option(help="Maximum number of restarts after a rank fails [default: 0]", rich_help_panel=RANKS),
]
Timeout = Annotated[
    float | None,
    Option(
        help="Seconds that a rank waits for another before the training ends [default: 60]",
        rich_help_panel=RANKS,
    ),
]
RunDir = Annotated[
    str | None,
    Option("--run-dir", help="New folder for the run [default: runs/TASK-TIME]", rich_help_panel=RUN),
]
