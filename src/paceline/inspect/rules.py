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

# Of rules about samples of GPUs: no device has shown the fault yet.
GPU = {"is_simulated": True, "needs_run": False}
RULES = (
    Rule("device-idle", "idle GPUs", device_rules.check_idle, **GPU),
    Rule("slow-input", "waiting for input", time_rules.check_input),
    Rule("straggler", "a rank slower than the others", rank_rules.check_straggler),
    Rule("communication", "time of communication", rank_rules.check_communication),
    Rule("pipeline", "balance of pipeline stages", rank_rules.check_pipeline),
    Rule("roofline", "computing compared with the device", prediction_rules.check_roofline),
    Rule("scaling", "gain from more ranks", rank_rules.check_scaling),
    Rule("evaluation", "time of evaluations", time_rules.check_evaluations),
    Rule("checkpoint", "time of checkpoints", time_rules.check_checkpoints),
    Rule("loss-spike", "spikes of the loss", learning_rules.check_spike),
    Rule("plateau", "a loss that does not improve", learning_rules.check_plateau),
    Rule("overflow", "updates skipped by fp16", learning_rules.check_overflow, is_simulated=True),
    Rule("precision", "a precision that the device lacks", setting_rules.check_precision),
    Rule("threads", "threads and cores", setting_rules.check_threads),
    Rule("ineffective-option", "options without effect", setting_rules.check_ineffective_options),
    Rule("tf32", "TF32 and Tensor Cores by the request", setting_rules.check_tf32, is_simulated=True),
    Rule("convolutions", "formats of convolutions", setting_rules.check_convolutions, is_simulated=True),
    Rule(
        "tensor-cores",
        "use of Tensor Cores",
        device_rules.check_tensor_cores,
        is_simulated=True,
        needs_run=False,
    ),
    Rule("throttling", "clocks of GPUs", device_rules.check_throttling, **GPU),
    Rule("gpu-memory", "full memory of GPUs", device_rules.check_full, **GPU),
    Rule("batch-size", "unused memory of GPUs", device_rules.check_small, **GPU),
    Rule("shared-gpu", "other jobs on the GPUs", device_rules.check_shared, **GPU),
    Rule(
        "gpu-errors",
        "memory errors of GPUs",
        device_rules.check_memory_errors,
        is_simulated=True,
        needs_run=False,
    ),
    Rule("memory-growth", "growing memory of ranks", host_rules.check_growth, needs_run=False),
    Rule("memory", "full memory of nodes", host_rules.check_memory, needs_run=False),
    Rule("swapping", "swapping", host_rules.check_swapping, needs_run=False),
    Rule("disk", "free space of the disk", host_rules.check_disk),
)
