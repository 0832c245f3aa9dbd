"""The rules as a table, in the order of a report if their costs are equal; docs/findings.md explains each."""

from paceline.inspect import (
    device_rules,
    host_rules,
    learning_rules,
    prediction_rules,
    rank_rules,
    setting_rules,
    time_rules,
)
from paceline.inspect.finding import Rule
from paceline.inspect.needs import (
    needs_cpu,
    needs_gpu,
    needs_ranks,
    needs_request,
    needs_run,
    needs_start,
    needs_step,
)

RULES = (
    Rule("device-idle", "idle GPUs", device_rules.check_idle, is_simulated=True),
    Rule("slow-input", "waiting for input", time_rules.check_input, (needs_step,)),
    Rule("straggler", "a rank slower than the others", rank_rules.check_straggler, (needs_ranks,)),
    Rule("communication", "time of communication", rank_rules.check_communication, (needs_ranks,)),
    Rule("pipeline", "balance of pipeline stages", rank_rules.check_pipeline, (needs_ranks,)),
    Rule("roofline", "computing compared with the device", prediction_rules.check_roofline, (needs_start,)),
    Rule("scaling", "gain from more ranks", rank_rules.check_scaling, (needs_ranks,)),
    Rule("evaluation", "time of evaluations", time_rules.check_evaluations, (needs_step,)),
    Rule("checkpoint", "time of checkpoints", time_rules.check_checkpoints, (needs_step,)),
    Rule("loss-spike", "spikes of the loss", learning_rules.check_spike, (needs_start,)),
    Rule("plateau", "a loss that does not improve", learning_rules.check_plateau, (needs_start,)),
    Rule(
        "overflow",
        "updates skipped by fp16",
        learning_rules.check_overflow,
        (needs_start,),
        is_simulated=True,
    ),
    Rule("precision", "a precision that the device lacks", setting_rules.check_precision, (needs_start,)),
    Rule("threads", "threads and cores", setting_rules.check_threads, (needs_cpu,)),
    Rule(
        "ineffective-option",
        "options without effect",
        setting_rules.check_ineffective_options,
        (needs_request,),
    ),
    Rule(
        "tf32",
        "TF32 and Tensor Cores by the request",
        setting_rules.check_tf32,
        (needs_request, needs_gpu),
        is_simulated=True,
    ),
    Rule(
        "convolutions",
        "formats of convolutions",
        setting_rules.check_convolutions,
        (needs_gpu,),
        is_simulated=True,
    ),
    Rule("tensor-cores", "use of Tensor Cores", device_rules.check_tensor_cores, is_simulated=True),
    Rule("throttling", "clocks of GPUs", device_rules.check_throttling, is_simulated=True),
    Rule("gpu-memory", "full memory of GPUs", device_rules.check_full, is_simulated=True),
    Rule("batch-size", "unused memory of GPUs", device_rules.check_small, is_simulated=True),
    Rule("shared-gpu", "other jobs on the GPUs", device_rules.check_shared, is_simulated=True),
    Rule("gpu-errors", "memory errors of GPUs", device_rules.check_memory_errors, is_simulated=True),
    Rule("memory-growth", "growing memory of ranks", host_rules.check_growth),
    Rule("memory", "full memory of nodes", host_rules.check_memory),
    Rule("swapping", "swapping", host_rules.check_swapping),
    Rule("disk", "free space of the disk", host_rules.check_disk, (needs_run,)),
)
