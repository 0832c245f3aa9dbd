"""Facts of a frozen model with adapters of low rank (LoRA, arXiv 2106.09685)."""

from dataclasses import replace

from paceline.plan.model.facts import BlockFacts, ModelFacts, Product, TensorVolume


def freeze(facts: ModelFacts, rank: int) -> ModelFacts:
    """Return the facts of the same model, frozen, with adapters of `rank` on queries, keys and values.

    The paper adapts the weights of attention only (section 4.2).
    """
    adapted: dict[int, BlockFacts] = {}
    for block, _ in facts.runs:
        adapted.setdefault(id(block), _adapt(block, rank))
    return replace(
        facts,
        first=replace(facts.first, frozen=1.0),
        runs=tuple((adapted[id(block)], count) for block, count in facts.runs),
        last=replace(facts.last, frozen=1.0, products=_frozen(facts.last.products)),
        shared_params=0,
    )


def _adapt(block: BlockFacts, rank: int) -> BlockFacts:
    adapted = block.products[:1] if block.attention else ()
    adapters = [pair for product in adapted for pair in _adapter(product, rank)]
    trained = sum(round(product.inner * product.columns) for product in adapters)
    # the adapter's output is added to that of the product: read both, write one
    added = sum(3.0 * product.rows * product.columns * product.count for product in adapted)
    narrow = sum(product.rows * rank * product.count for product in adapted)
    return replace(
        block,
        params=block.params + trained,
        frozen=block.params / (block.params + trained),
        products=(*_frozen(block.products), *adapters),
        traffic=block.traffic.plus(TensorVolume(split=added)),
        saved={
            kind: volume if kind == "full" else volume.plus(TensorVolume(whole=narrow))
            for kind, volume in block.saved.items()
        },
        kernels=block.kernels + 3 * len(adapted),
    )


def _adapter(product: Product, rank: int) -> tuple[Product, Product]:
    return (
        Product(
            product.rows, rank, product.inner, product.count, "inner" if product.cut == "inner" else None
        ),
        Product(
            product.rows,
            product.columns,
            rank,
            product.count,
            product.cut if product.cut == "columns" else None,
        ),
    )


def _frozen(products: tuple[Product, ...]) -> tuple[Product, ...]:
    return tuple(replace(product, frozen=True) for product in products)
