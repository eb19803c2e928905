"""The Triton kernel of paged attention: a tile of queries of one KV head against a share of one sequence's blocks.

Decode and prefill are this one kernel with a different tile height. The rows of a sequence are its pairs (query,
head of the GQA group) in that order, ``queries * group`` of them, cut into tiles of ``block_m`` rows: with one query
a sequence, a whole group is one tile of 16 rows. Tiles never straddle sequences: those of sequence ``s`` begin at
number ``offsets[s] * group // block_m + s``, so the grid needs no knowledge of how long each sequence is.

A program reads its sequence's block table once to find the range of entries that its rows can see at all (tables in
order make that range tight, any order stays correct), takes its share of the range, and runs over it with a straight
loop whose loads are masked, so that the compiler may pipeline them. Blocks are absolute addresses: memory of the
device, memory of another process mapped by CUDA IPC, and pinned host memory are all read alike.

An int8 slice pairs channel ``i`` with channel ``i + head_dim / 2`` and token ``i`` with ``i + block_tokens / 2`` in one
16-bit word, so a tile of words is two tiles of codes that are multiplied as they are: no shuffles, nothing
dequantised in memory. The per-channel scale goes into q, the zero point into one number a row, V's scale into the
weights. Codes become fp16 by placing the byte in the mantissa of 1024 (``0x6400``) and subtracting. What multiplies
them is split into two fp16 numbers, so that only the codec loses anything.

Sums are fp32. Not yet run on hardware: checked in the interpreter, compiled for the targets of ``compile_gate``.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

WEIGHT_SHIFT = tl.constexpr(15.0)
"""Weights are kept times two to this power: they fill the range of fp16, and one of 1e-6 is not yet subnormal."""

QUERY_SHIFT = tl.constexpr(6.0)
"""Queries that meet int8 keys are scaled to lie within two to this power."""

SEQUENCE_SCAN = tl.constexpr(128)
"""Sequences looked at in one step when a tile looks for its own."""

TABLE_SCAN = tl.constexpr(1024)
"""Table entries looked at in one step when a program looks for those that it needs."""


@triton.jit
def find_sequence(query_offsets, sequences, tile, FORM: tl.constexpr):
    """Return the last sequence whose first tile is not after ``tile``."""
    found = 0
    for base in range(0, sequences, SEQUENCE_SCAN):
        index = base + tl.arange(0, SEQUENCE_SCAN)
        inside = index < sequences
        first_row = tl.load(query_offsets + index, mask=inside, other=0) * FORM.group
        found += tl.sum((inside & (first_row // FORM.block_m + index <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit
def find_entries(addresses, starts, blocks, first_seen, last_seen, FORM: tl.constexpr):
    """Return the half-open range of table entries that holds every block with a token in first_seen..last_seen.

    Without such a block the range is blocks..0, so its length is negative.
    """
    low = tl.full((TABLE_SCAN,), 0, tl.int32) + blocks
    high = tl.full((TABLE_SCAN,), 0, tl.int32)
    for base in range(0, blocks, TABLE_SCAN):
        index = base + tl.arange(0, TABLE_SCAN)
        inside = index < blocks
        address = tl.load(addresses + index, mask=inside, other=0)
        start = tl.load(starts + index, mask=inside, other=0)
        wanted = (address != 0) & (start <= last_seen) & (start + FORM.block_tokens > first_seen)
        low = tl.minimum(low, tl.where(wanted, index, blocks))
        high = tl.maximum(high, tl.where(wanted, index + 1, 0))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def pointer_at(base, TYPE: tl.constexpr, FORM: tl.constexpr):
    """Return a byte address as a pointer whose alignment the compiler knows; without it loads are of 2 bytes."""
    ALIGNMENT: tl.constexpr = FORM.alignment
    return tl.multiple_of(base.to(tl.pointer_type(TYPE)), ALIGNMENT)


@triton.jit
def multiply(left, right, total, FORM: tl.constexpr):
    """``total + left @ right`` in fp32. The interpreter would multiply the raw bits of bf16, so there it sees fp32."""
    if FORM.fp32_products:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=FORM.precision)


@triton.jit
def multiply_codes(left, codes, total, FORM: tl.constexpr):
    """``total + left @ codes`` for fp32 ``left`` and fp16 codes: two products, the second of what fp16 rounds away."""
    coarse = left.to(tl.float16)
    total = multiply(coarse, codes, total, FORM)
    return multiply((left - coarse.to(tl.float32)).to(tl.float16), codes, total, FORM)


@triton.jit
def finish_scores(scores, factor, seen, soft_cap, FORM: tl.constexpr):
    """Scale, cap and mask dot products [rows, tokens]; the result is in units of log2, -inf where unseen."""
    scores = scores * factor[:, None]
    if FORM.soft_cap:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); both ends saturate without a NaN.
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))
    return tl.where(seen, scores * LOG2_E, float("-inf"))


@triton.jit
def see(positions, places, window, live, FORM: tl.constexpr):
    """Return which token each row sees, [rows, tokens]."""
    seen = live & (positions[None, :] <= places[:, None])
    if FORM.window:
        seen = seen & (positions[None, :] > places[:, None] - window)
    return seen


@triton.jit
def shift_top(top, tile_top):
    """Return the new running maximum, a finite stand-in where it is -inf, and the decay of what was summed before."""
    new_top = tl.maximum(top, tile_top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, safe, tl.exp2(top - safe)


@triton.jit
def low_codes(words):
    """The int8 in the low byte of each int16, as fp16: exact."""
    return ((words & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def high_codes(words):
    """The int8 in the high byte of each int16, as fp16: exact."""
    return (((words >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def attend_raw(state, query, factor, block, limits, window, soft_cap, FORM: tl.constexpr):
    """Take one tile of a raw head, K [head_dim, block_tokens] then V [block_tokens, head_dim], into ``state``."""
    top, mass, total = state
    base, first_token, start, live = block
    places, last_seen = limits
    pointer = pointer_at(base, FORM.raw, FORM)
    channels = tl.arange(0, FORM.block_d)
    tokens = first_token + tl.arange(0, FORM.tile)
    positions = start + tokens
    key = tl.load(
        pointer + channels[:, None] * FORM.block_tokens + tokens[None, :],
        mask=(channels < FORM.head_dim)[:, None] & live,
        other=0.0,
    )
    # A token that no row sees may lie in memory that was never written: its weight is 0, and 0 * NaN is NaN.
    written = live & (positions <= last_seen)
    value = tl.load(
        pointer + FORM.head_dim * FORM.block_tokens + tokens[:, None] * FORM.head_dim + channels[None, :],
        mask=written[:, None] & (channels < FORM.head_dim)[None, :],
        other=0.0,
    )
    scores = multiply(query, key, tl.full((FORM.block_m, FORM.tile), 0.0, tl.float32), FORM)
    scores = finish_scores(scores, factor, see(positions, places, window, live, FORM), soft_cap, FORM)
    top, safe, decay = shift_top(top, tl.max(scores, 1))
    weights = tl.exp2(scores - (safe - WEIGHT_SHIFT)[:, None])
    mass = mass * decay + tl.sum(weights, 1)
    total = multiply(weights.to(FORM.raw), value, total * decay[:, None], FORM)
    return top, mass, total


@triton.jit
def int8_scores(low_query, high_query, constant, words, FORM: tl.constexpr):
    """Scores of one half of a tile's tokens from words that pair channels: both codes of a word, then the constant."""
    scores = tl.full((FORM.block_m, FORM.tile // 2), 0.0, tl.float32) + constant[:, None]
    scores = multiply_codes(low_query, low_codes(words), scores, FORM)
    return multiply_codes(high_query, high_codes(words), scores, FORM)


@triton.jit
def load_int8_keys(query, base, first_token, live, FORM: tl.constexpr):
    """Read K's words of both halves of a tile and fold scale and zero point into the query halves."""
    low_query, high_query = query[0].to(tl.float32), query[1].to(tl.float32)
    half: tl.constexpr = FORM.head_dim // 2
    pairs = tl.arange(0, FORM.half_d)
    inside = (pairs < half) & live
    params = pointer_at(base, tl.float16, FORM) + FORM.head_dim * FORM.block_tokens + pairs
    low_scale = tl.load(params, mask=inside, other=0.0).to(tl.float32)
    high_scale = tl.load(params + half, mask=inside, other=0.0).to(tl.float32)
    low_zero = tl.load(params + FORM.head_dim, mask=inside, other=0.0).to(tl.float32)
    high_zero = tl.load(params + FORM.head_dim + half, mask=inside, other=0.0).to(tl.float32)
    constant = tl.sum(low_query * low_zero[None, :] + high_query * high_zero[None, :], 1)
    tokens = first_token + tl.arange(0, FORM.tile // 2)
    words = pointer_at(base, tl.int16, FORM) + pairs[:, None] * FORM.block_tokens + tokens[None, :]
    low_words = tl.load(words, mask=inside[:, None], other=0)
    high_words = tl.load(words + FORM.block_tokens // 2, mask=inside[:, None], other=0)
    folded = low_query * low_scale[None, :], high_query * high_scale[None, :]
    return folded, constant, low_words, high_words


@triton.jit
def attend_int8(state, query, factor, block, limits, window, soft_cap, FORM: tl.constexpr):
    """Take one tile of an int8 head into ``state``: half of it from the block's first half, half from its second."""
    top, mass, total = state
    base, first_token, start, live = block
    places, last_seen = limits
    folded, constant, low_words, high_words = load_int8_keys(query, base, first_token, live, FORM)
    tokens = first_token + tl.arange(0, FORM.tile // 2)
    channels = tl.arange(0, FORM.block_d)
    values = tl.load(
        pointer_at(base, tl.int16, FORM)
        + (FORM.head_dim * FORM.block_tokens) // 2 + tokens[:, None] * FORM.head_dim + channels[None, :],
        mask=(channels < FORM.head_dim)[None, :] & live,
        other=0,
    )  # fmt: skip
    positions = start + tokens
    scales = pointer_at(base, tl.float16, FORM) + FORM.head_dim * (FORM.block_tokens + 2) + tokens
    half: tl.constexpr = FORM.block_tokens // 2
    low_scale = tl.load(scales, mask=live & (positions <= last_seen), other=0.0)
    high_scale = tl.load(scales + half, mask=live & (positions + half <= last_seen), other=0.0)
    low = int8_scores(folded[0], folded[1], constant, low_words, FORM)
    high = int8_scores(folded[0], folded[1], constant, high_words, FORM)
    low = finish_scores(low, factor, see(positions, places, window, live, FORM), soft_cap, FORM)
    high = finish_scores(high, factor, see(positions + half, places, window, live, FORM), soft_cap, FORM)
    top, safe, decay = shift_top(top, tl.maximum(tl.max(low, 1), tl.max(high, 1)))
    low = tl.exp2(low - (safe - WEIGHT_SHIFT)[:, None])
    high = tl.exp2(high - (safe - WEIGHT_SHIFT)[:, None])
    mass = mass * decay + tl.sum(low, 1) + tl.sum(high, 1)
    # Scales relative to the tile's largest keep the products inside fp16's range whatever V's magnitude is.
    unit = tl.maximum(tl.max(low_scale, 0), tl.max(high_scale, 0)).to(tl.float32)
    inverse = tl.where(unit > 0.0, 1.0 / unit, 0.0)
    low = low * (low_scale.to(tl.float32) * inverse)[None, :]
    high = high * (high_scale.to(tl.float32) * inverse)[None, :]
    product = tl.full((FORM.block_m, FORM.block_d), 0.0, tl.float32)
    product = multiply_codes(low, low_codes(values), product, FORM)
    product = multiply_codes(high, high_codes(values), product, FORM)
    return top, mass, total * decay[:, None] + product * unit


@triton.jit
def load_raw_query(pointer, row_inside, FORM: tl.constexpr):
    """Read a tile of queries [block_m, block_d] in the slices' dtype; ``pointer`` is [block_m], one a row."""
    channels = tl.arange(0, FORM.block_d)
    mask = row_inside[:, None] & (channels < FORM.head_dim)[None, :]
    return tl.load(pointer[:, None] + channels[None, :], mask=mask, other=0.0).to(FORM.raw)


@triton.jit
def load_int8_query(pointer, row_inside, FORM: tl.constexpr):
    """Read a tile of queries as two halves of its channels, each row divided by a power of two to lie in -64..64.

    Returns the halves and the powers, [block_m]. The halves are fp16, or fp32 if the queries are: fp16 would cost those
    4e-4 of the answer. Dividing loses nothing of fp16 or bf16 queries but what is 2**-30 of the row's largest, and
    keeps the product with a scale, which the codec bounds by 473, inside fp16's range, high enough in it that what a
    second product corrects is not subnormal.
    """
    half: tl.constexpr = FORM.head_dim // 2
    pairs = tl.arange(0, FORM.half_d)
    mask = row_inside[:, None] & (pairs < half)[None, :]
    low = tl.load(pointer[:, None] + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(pointer[:, None] + half + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    unit = tl.where(largest > 0.0, tl.exp2(tl.ceil(tl.log2(largest)) - QUERY_SHIFT), 1.0)
    low /= unit[:, None]
    high /= unit[:, None]
    if pointer.dtype.element_ty != tl.float32:
        low = low.to(tl.float16)
        high = high.to(tl.float16)
    return low, high, unit


@triton.jit
def my_share(low, high, split, splits):
    """Return share number ``split`` of the table entries low..high, half-open; empty when there are too few."""
    share = (tl.maximum(high - low, 0) + splits - 1) // splits
    begin = low + split * share
    return begin, tl.minimum(begin + share, high)


@triton.jit
def store_partial(out, lse, state, pair, row_inside, FORM: tl.constexpr):
    """Write a tile's normalised values and natural-log sums; ``pair`` is each row's place in ``lse``."""
    top, mass, total = state
    channels = tl.arange(0, FORM.block_d)
    empty = mass == 0.0
    values = total / tl.where(empty, 1.0, mass)[:, None]
    log = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, mass)) - WEIGHT_SHIFT) * LN_2)
    tl.store(lse + pair, log, mask=row_inside)
    mask = row_inside[:, None] & (channels < FORM.head_dim)[None, :]
    tl.store(out + pair[:, None] * FORM.head_dim + channels[None, :], values, mask=mask)


@triton.jit
def locate_rows(query_offsets, context_lens, sequences, blocks, window, FORM: tl.constexpr):
    """Find this program's rows.

    Returns its sequence, how many table entries to look at, each row's place among (query, head) pairs, which rows
    exist, the position of each, and the first and last position that any of them may see.
    """
    tile = tl.program_id(0)
    sequence = find_sequence(query_offsets, sequences, tile, FORM)
    first_query = tl.load(query_offsets + sequence)
    queries = tl.load(query_offsets + sequence + 1) - first_query
    context = tl.load(context_lens + sequence)
    tile -= first_query * FORM.group // FORM.block_m + sequence
    row = tile * FORM.block_m + tl.arange(0, FORM.block_m)
    row_inside = row < queries * FORM.group
    places = context - queries + row // FORM.group
    last_row = tl.minimum((tile + 1) * FORM.block_m, queries * FORM.group) - 1
    last_seen = context - queries + last_row // FORM.group
    first_seen = 0
    if FORM.window:
        first_seen = context - queries + tile * FORM.block_m // FORM.group - window + 1
    # A tile after its sequence's last one has no rows, and looks at no entry.
    entries = tl.where(tile * FORM.block_m < queries * FORM.group, blocks, 0)
    head = tl.program_id(1) * FORM.group + row % FORM.group
    pair = (first_query + row // FORM.group).to(tl.int64) * (FORM.kv_heads * FORM.group) + head
    return sequence, entries, pair, row_inside, places, (first_seen, last_seen)


@triton.jit(do_not_specialize=["rows", "sequences", "blocks", "layer_offset", "window"])
def paged_attention_kernel(
    query,
    addresses,
    starts,
    query_offsets,
    context_lens,
    out,
    lse,
    rows,
    sequences,
    blocks,
    layer_offset,
    score_scale,
    window,
    soft_cap,
    FORM: tl.constexpr,
):
    """Grid (tiles, kv_heads, splits); writes partial number ``split`` of its rows.

    ``query`` [rows, kv_heads * group, head_dim], contiguous; ``addresses`` int64 and ``starts`` int32 [sequences,
    blocks]; ``query_offsets`` int32 [sequences + 1]; ``context_lens`` int32 [sequences]; ``out`` fp32 [splits, rows,
    heads, head_dim]; ``lse`` fp32 [splits, rows, heads]. ``layer_offset`` in bytes. ``window`` and ``soft_cap``
    are read only where the form says so. Every row and split is written; what sees nothing gets 0 and -inf.
    """
    split = tl.program_id(2)
    kv_head = tl.program_id(1)
    sequence, entries, pair, row_inside, places, seen = locate_rows(
        query_offsets, context_lens, sequences, blocks, window, FORM
    )
    first_seen, last_seen = seen
    if FORM.raw is None:
        low_query, high_query, unit = load_int8_query(query + pair * FORM.head_dim, row_inside, FORM)
        tile_query = low_query, high_query
        factor = unit * score_scale
    else:
        tile_query = load_raw_query(query + pair * FORM.head_dim, row_inside, FORM)
        factor = tl.full((FORM.block_m,), 0.0, tl.float32) + score_scale

    top = tl.full((FORM.block_m,), float("-inf"), tl.float32)
    mass = tl.full((FORM.block_m,), 0.0, tl.float32)
    total = tl.full((FORM.block_m, FORM.block_d), 0.0, tl.float32)
    row_addresses = addresses + sequence.to(tl.int64) * blocks
    row_starts = starts + sequence.to(tl.int64) * blocks
    low, high = find_entries(row_addresses, row_starts, entries, first_seen, last_seen, FORM)
    low, high = my_share(low, high, split, tl.num_programs(2))
    row_addresses += low
    row_starts += low
    STEPS: tl.constexpr = FORM.block_tokens // FORM.tile
    # From 0: with a lower bound that a reduction made, the compiler's analysis of alignment gives up on the whole loop
    # and loads 2 bytes at a time instead of 16.
    for step in range((high - low) * STEPS):
        address = tl.load(row_addresses + step // STEPS)
        start = tl.load(row_starts + step // STEPS)
        live = (address != 0) & (start <= last_seen) & (start + FORM.block_tokens > first_seen)
        base = address + layer_offset + kv_head * FORM.head_bytes
        if FORM.raw is None:
            block = base, (step % STEPS) * (FORM.tile // 2), start, live
            top, mass, total = attend_int8(
                (top, mass, total), tile_query, factor, block, (places, last_seen), window, soft_cap, FORM
            )
        else:
            block = base, (step % STEPS) * FORM.tile, start, live
            top, mass, total = attend_raw(
                (top, mass, total), tile_query, factor, block, (places, last_seen), window, soft_cap, FORM
            )
    pair += split.to(tl.int64) * rows * (FORM.kv_heads * FORM.group)
    store_partial(out, lse, (top, mass, total), pair, row_inside, FORM)
