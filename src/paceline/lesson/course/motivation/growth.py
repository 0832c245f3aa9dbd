"""Growth of models, and what a training costs.

Why distributed training at all? Models grew faster than devices. This lesson needs no ranks: it
estimates the time and the price of a training from a few numbers, and checks the estimate against
published ones.
"""

# %%
# ## Parameters by year
#
# From 2018 to 2021 language models grew by a factor of more than 1,000. In the same time, the memory of
# a GPU grew from 32 to 80 GB. With Adam in mixed precision, a parameter takes 16 bytes.
from paceline.lesson import ask, check, picture, rows

MODELS = (
    ("AlexNet", 2012, 0.061),
    ("ResNet-50", 2015, 0.0256),
    ("BERT-large", 2018, 0.34),
    ("GPT-2", 2019, 1.5),
    ("Megatron-LM", 2019, 8.3),
    ("Turing-NLG", 2020, 17.0),
    ("GPT-3", 2020, 175.0),
    ("MT-NLG", 2021, 530.0),
)
lines = [(name, year, billions, billions * 16, -(-billions * 16 // 80)) for name, year, billions in MODELS]
rows("Models", ("model", "year", "10⁹ parameters", "GB to train", "GPUs of 80 GB at least"), lines)
check("GPT-3 needs 35 GPUs for its state alone", lines[6][4], 35.0)


@picture("Billions of parameters by year")
def draw(figure):
    axes = figure.subplots()
    for name, year, billions in MODELS:
        axes.semilogy(year, billions, "o", color="#2065c4")
        axes.annotate(name, (year, billions), xytext=(5, 2), textcoords="offset points", fontsize=8)
    axes.margins(x=0.15)


# %%
# ## Operations: 6 for each parameter and token
#
# The forward pass of a token takes 2 operations for each parameter (a product and a sum), and the
# backward pass 4. With recomputed activations there is another forward pass: 8. GPT-3 was trained on 300
# billion tokens.
#
# A V100 achieves about 28 · 10¹² operations in a second on such a model. One V100 would need 355 years.
PARAMETERS, TOKENS, YEAR_S = 174.6e9, 300e9, 365 * 86400
operations = 6 * PARAMETERS * TOKENS
years = operations / 28e12 / YEAR_S
price = 355 * 365 * 24 * 0.9792
rows(
    "GPT-3 on one V100",
    ("operations", "years", "price of 355 years at 0.9792 $/h"),
    [(operations, years, price)],
)
check("one V100 needs 355 to 356 years", int(years), 355)
check("3,045,116 $", int(price), 3_045_116)

# %%
# ## Many GPUs: days of a training
#
# With n GPUs at X operations in a second each: days = 8 · T · P / (n · X · 86,400). The published rates
# of two systems show why X matters: if ZeRO-3 alone is used on more GPUs, each becomes slower, because
# the batch for each GPU shrinks.
RUNS = (
    ("ZeRO-3", 174.6e9, 384, 144e12, 90),
    ("ZeRO-3", 174.6e9, 768, 88e12, 74),
    ("ZeRO-3", 174.6e9, 1536, 44e12, 74),
    ("tensor, pipeline, data", 174.6e9, 384, 153e12, 84),
    ("tensor, pipeline, data", 174.6e9, 768, 149e12, 43),
    ("tensor, pipeline, data", 174.6e9, 1536, 141e12, 23),
    ("tensor, pipeline, data", 529.6e9, 2240, 159e12, 42),
)


def days(parameters, devices, rate):
    return 8 * TOKENS * parameters / (devices * rate) / 86400


lines = [(name, p / 1e9, n, rate / 1e12, days(p, n, rate), published) for name, p, n, rate, published in RUNS]
rows(
    "Days for 300 billion tokens (Narayanan et al. 2021)",
    ("scheme", "10⁹ parameters", "GPUs", "TFLOP/s of each", "formula", "published"),
    lines,
)
for _, _, n, _, formula, published in lines:
    check(f"{n} GPUs: {published} days within 4 %", abs(formula / published - 1) < 0.04)


@picture("Days by the number of GPUs, for 175 billion parameters")
def draw_days(figure):
    axes = figure.subplots()
    for name in ("ZeRO-3", "tensor, pipeline, data"):
        points = [(n, formula) for kind, p, n, _, formula, _ in lines if kind == name and p < 200]
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.legend()


# %%
# ## Prices: the same hour, four times
#
# A cloud asks for an hour of one V100 3.06 $ on demand, 1.9492 $ with a contract of a year, 0.9792 $
# with three, and 0.306 $ for a spot machine, which may be taken away at any time. Spot needs what the
# lesson about checkpoints shows.
PRICES = {"on demand": 3.06, "1 year": 1.9492, "3 years": 0.9792, "spot": 0.306}
bills = [(name, hour, 355 * 8760 * hour) for name, hour in PRICES.items()]
rows("355 years on one V100", ("contract", "$ an hour", "$"), bills)
check("spot costs a tenth", bills[3][2] * 10, bills[0][2], 1.0)

# %%
# ## Question
ask(
    "You have 64 GPUs for 10 days, each with 300 TFLOP/s of which you achieve 40 %. How many tokens "
    "can a model of 7 billion parameters see, without recomputation?",
    "64 · 10 · 86,400 s · 120e12 = 6.6e21 operations, divided by 6 · 7e9: 158 billion tokens. "
    "`paceline plan --tokens` does this with a predicted rate instead of a guess.",
)
