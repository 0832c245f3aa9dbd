"""Mixed precision: what 16 bits can and cannot hold.

Devices compute several times faster with 16 bits, and 16-bit tensors need half the memory and half the
bytes in messages. Three things go wrong if everything is simply converted: small updates vanish, small
gradients vanish, and sums lose digits.
"""

# %%
# ## The formats
#
# A number has a sign, an exponent (its range) and a fraction (its digits). bfloat16 has the range of
# float32 and only 3 digits. float16 has more digits, but a small range. TF32 is not a storage format:
# devices round the inputs of float32 products to 10 bits of fraction.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

n = num_ranks()
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
infos = [torch.finfo(dtype) for dtype in FORMATS]
lines = [
    (str(dtype).removeprefix("torch."), info.bits, info.eps, info.max, info.tiny)
    for dtype, info in zip(FORMATS, infos, strict=True)
]
rows("Formats", ("format", "bits", "step after 1", "largest", "smallest normal"), lines)

# %%
# ## TF32: the fraction of a product is cut
#
# A device that multiplies in TF32 rounds both factors to 10 bits of fraction, and adds up in float32. The
# tensors remain float32, so nothing in the program shows it: `torch.backends.cuda.matmul.fp32_precision`
# decides. Rounding by hand gives the error that the device would make, without the device.


def round_fraction(x, bits):
    """Round a float32 tensor to this number of bits of fraction; float32 has 23, bfloat16 has 7."""
    unit = 1 << (23 - bits)
    return ((x.view(torch.int32) + unit // 2) & -unit).view(torch.float32)


draw_factors = torch.Generator().manual_seed(0)
a, b = torch.rand(2, 64, 64, generator=draw_factors)
exact, errors = a.double() @ b.double(), []
for name, bits in (("float32", 23), ("TF32", 10), ("bfloat16", 7)):
    product = round_fraction(a, bits).double() @ round_fraction(b, bits).double()
    errors.append((name, bits, ((product - exact) / exact).abs().max().item()))
rows("Largest relative error of a product of 64 terms", ("factors", "bits", "error"), errors)
check("7 bits of fraction are bfloat16", round_fraction(a, 7), a.bfloat16().float())
check("the error of TF32 is between the others", errors[0][2] < errors[1][2] < errors[2][2])

# %%
# ## Small updates vanish: keep main weights in float32
#
# 1 + 0.001 is 1 in bfloat16. A weight of 1 never changes, however many steps are made. So the optimizer
# updates a float32 copy, the **main weights**, and casts it for each forward pass.
plain, main = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
for _ in range(100):
    plain += 0.001
    main += 0.001
rows(
    "A weight after 100 updates of 0.001",
    ("bfloat16", "main weight", "its cast"),
    [(plain.item(), main.item(), main.bfloat16().item())],
)
check("the bfloat16 weight did not move", plain.item(), 1.0)
check("the main weight did", main.item(), 1.1, 1e-4)

# %%
# ## Small gradients vanish: scale the loss
#
# Below 6e-8, a float16 is 0. **Loss scaling** multiplies the loss by a large number, so that all
# gradients grow, and divides them by it before the update. If a gradient overflows, the step is skipped
# and the scale is halved. bfloat16 needs no scaling.


def gradient_of(scale):
    w = torch.tensor([1.0], dtype=torch.float16, requires_grad=True)
    loss = (w * torch.tensor([1e-4], dtype=torch.float16)).float() * 1e-4 * scale
    loss.sum().backward()
    return (w.grad.float() / scale).item()


scales = (1.0, 1024.0, 65536.0, 2.0**40)
results = [gradient_of(scale) for scale in scales]
rows("A gradient of 1e-8 in float16", ("loss scale", "gradient"), list(zip(scales, results, strict=True)))
check("without scaling it is 0", results[0], 0.0)
check("with a scale of 65,536 it is right within 1 %", results[2], 1e-8, 1e-10)
check("with too large a scale it is infinite", results[3], float("inf"))

# %%
# ## Sums lose digits: reduce in float32
#
# An all-reduce in bfloat16 rounds after every addition. Here each rank adds 1 to 256 on rank 0: the sum
# of bfloat16 stays 256, because the next number is 258.


def reduce(dtype):
    x = torch.tensor([256.0 if dist.get_rank() == 0 else 1.0], dtype=dtype)
    total = x.clone()
    for rank in range(1, dist.get_world_size()):  # as a chain of additions
        part = x.clone()
        dist.broadcast(part, src=rank)
        if dist.get_rank() == 0:
            total += part
    return {"own": x.item(), "sum": total.item() if dist.get_rank() == 0 else None}


in_float32, in_bfloat16 = run(reduce, torch.float32), run(reduce, torch.bfloat16)
table(
    "A sum on rank 0",
    {
        "own": column(in_float32, "own"),
        "float32": column(in_float32, "sum"),
        "bfloat16": column(in_bfloat16, "sum"),
    },
)
check("the float32 sum is right", in_float32[0]["sum"], 256.0 + n - 1)
check("the bfloat16 sum is not", in_bfloat16[0]["sum"], 256.0)


@picture("The sum of 256 and k ones")
def draw(figure):
    axes = figure.subplots()
    total = torch.tensor(256.0, dtype=torch.bfloat16)
    sums = [(total := total + 1).item() for _ in range(16)]
    axes.plot(range(1, 17), [256 + k for k in range(1, 17)], label="float32")
    axes.plot(range(1, 17), sums, label="bfloat16")
    axes.legend()


# %%
# ## Question
ask(
    "A model has 7 billion parameters. How many bytes do bfloat16 weights and gradients, and float32 "
    "main weights and Adam moments need? Does it fit into 80 GB?",
    "7e9 · (2 + 2 + 4 + 8) = 112 GB: no. ZeRO-3 on 2 ranks needs 56 GB on each, without activations.",
)
