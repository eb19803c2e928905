// How passes become pieces, and pieces become reads. The engine's lock is held throughout.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "plan_state.h"

namespace kv {
namespace {

// Whether the ring has a slot: asks the reader's count, which is believed only where it can be true.
bool has_slot(Plan& plan) {
    PlanControl& control = plan.control();
    for (int look = 0; look < 2; ++look) {
        const std::uint32_t done = control.done.load(std::memory_order_seq_cst);
        if (plan.landed - done > plan.ring.slots) {
            end_plan(plan, 0, kNoBlock);  // it says that it gave back what it never had
            return false;
        }
        plan.done = done;
        if (plan.opened - done < plan.ring.slots) return true;
        // Asked for before the second look, so that what is given back in between is either seen or told.
        control.hungry.store(1, std::memory_order_seq_cst);
    }
    return false;
}

// Go on to where the next piece of a pass begins; false at its end.
bool more(PlanPass& pass) {
    while (pass.layer < pass.layer_end) {
        if (pass.run < pass.runs.size()) {
            if (pass.at < pass.runs[pass.run].count) return true;
            ++pass.run;
        } else {
            pass.run = 0;
            ++pass.layer;
        }
        pass.at = 0;
    }
    return false;
}

void add_parts(const Plan& plan, std::uint32_t block, std::uint32_t layer, std::uint64_t to, std::vector<PlanPart>& parts) {
    const PlanKind& kind = plan.kinds[plan.blocks[block].kind];
    std::uint64_t left = kind.slice_bytes[layer];
    for (std::uint32_t unit = kind.first_unit[layer]; unit < kind.first_unit[layer + 1]; ++unit) {
        PlanPart part{};
        part.block = block;
        part.unit = unit;
        part.to = to;
        part.crc_bytes = kind.unit_bytes;
        part.copy_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, kind.unit_bytes));
        renew_part(plan, part);
        parts.push_back(part);
        const std::uint64_t step = std::min<std::uint64_t>(left, kind.unit_stride);
        to += step;
        left -= step;
    }
}

}  // namespace

void renew_part(const Plan& plan, PlanPart& part) {
    const PlanBlock& block = plan.blocks[part.block];
    const std::uint64_t row = block.row + part.unit;
    part.offset = plan.offsets[row];
    part.length = plan.lengths[row];
    part.crc = plan.crcs[row];
    part.planes = block.planes;
}

std::vector<PlanRun> runs_of(const Plan& plan, const PlanPass& pass) {
    std::vector<PlanRun> runs;
    const std::size_t count = pass.blocks.empty() ? plan.blocks.size() : pass.blocks.size();
    for (std::uint32_t position = 0; position < count; ++position) {
        const PlanBlock& block = plan.blocks[pass.block(position)];
        if (block.state == BlockState::absent) continue;
        if (!runs.empty() && runs.back().kind == block.kind && runs.back().first + runs.back().count == position)
            ++runs.back().count;
        else
            runs.push_back({position, 1, block.kind});
    }
    return runs;
}

std::uint64_t pieces_of(const Plan& plan, const PlanPass& pass) {
    // Most layers are cut alike, and runs may be as many as blocks.
    std::map<std::vector<std::uint32_t>, std::uint64_t> known;
    std::uint64_t pieces = 0;
    for (std::uint32_t layer = pass.layer; layer < pass.layer_end; ++layer) {
        std::vector<std::uint32_t> most;
        for (std::uint32_t kind = 0; kind < plan.kinds.size(); ++kind) most.push_back(plan.blocks_a_piece(kind, layer));
        const auto [at, fresh] = known.try_emplace(most, 0);
        if (fresh)
            for (const PlanRun& run : pass.runs) at->second += (run.count + most[run.kind] - 1) / most[run.kind];
        pieces += at->second;
    }
    return pieces;
}

std::uint32_t cut_chunks(Plan& plan, std::uint32_t sequence, std::vector<PlanPart>& parts, std::size_t io_bytes) {
    std::uint32_t made = 0;
    std::int32_t file = -1;
    for (PlanPart& part : parts) {
        const std::int32_t mine = plan.blocks[part.block].file;
        const std::uint64_t begin = part.offset / kPage * kPage;
        const std::uint64_t end = (part.offset + part.length + kPage - 1) / kPage * kPage;
        PlanChunk* last = made ? &plan.ready.back() : nullptr;
        const bool joins = last != nullptr && mine == file && part.offset >= last->parts.back().offset &&
                           begin <= last->end + kGapMax && std::max(end, last->end) - last->begin <= io_bytes;
        if (!joins) {
            plan.ready.push_back({sequence, plan.files[mine], begin, end, {}});
            last = &plan.ready.back();
            file = mine;
            ++made;
        }
        last->end = std::max(last->end, end);
        last->parts.push_back(part);
    }
    return made;
}

bool open_piece(PlanEngine::State& state, Plan& plan, std::vector<PlanEvent>& events) {
    while (!plan.passes.empty() && !more(plan.passes.front())) plan.passes.pop_front();
    if (plan.passes.empty() || !has_slot(plan)) return false;
    PlanPass& pass = plan.passes.front();
    const PlanRun& run = pass.runs[pass.run];
    const std::uint32_t count = std::min(plan.blocks_a_piece(run.kind, pass.layer), run.count - pass.at);
    const std::uint32_t first = run.first + pass.at, sequence = plan.opened++;
    const std::uint64_t slice_bytes = plan.kinds[run.kind].slice_bytes[pass.layer];
    const std::uint32_t codec = plan.kinds[run.kind].codec[pass.layer];
    plan.piece(sequence) = {sequence, pass.id, pass.layer, first, count, static_cast<std::uint32_t>(slice_bytes), codec, {}};
    PlanSlot& slot = plan.slot(sequence);
    slot = {sequence, 0, {}};
    std::vector<PlanPart> parts;
    parts.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint32_t block = pass.block(first + i);
        if (plan.blocks[block].state == BlockState::on_file)
            add_parts(plan, block, pass.layer, i * slice_bytes, parts);
        else
            slot.fills.push_back({block, pass.layer, i * slice_bytes});
    }
    slot.pending = cut_chunks(plan, sequence, parts, state.io_bytes);
    if (!slot.fills.empty()) {
        ++slot.pending;
        events.push_back({plan.id, PlanEventKind::fill, sequence, kNoBlock, false});
    }
    pass.at += count;
    return true;
}

void settle(Plan& plan, std::uint32_t sequence) {
    if (--plan.slot(sequence).pending != 0) return;
    const std::uint32_t before = plan.landed;
    while (plan.landed != plan.opened && plan.slot(plan.landed).pending == 0) ++plan.landed;
    if (plan.landed == before) return;
    plan.control().landed.store(plan.landed, std::memory_order_release);
    wake_reader(plan);
}

void end_plan(Plan& plan, std::uint32_t reason, std::uint32_t block) {
    if (plan.ended) return;
    plan.ended = true;
    plan.ready.clear();
    plan.troubled.clear();
    plan.passes.clear();
    PlanControl& control = plan.control();
    control.reason.store(reason, std::memory_order_relaxed);
    control.block.store(block, std::memory_order_relaxed);
    control.state.store(1, std::memory_order_release);
    wake_reader(plan);
}

void wake_reader(const Plan& plan) {
    PlanControl& control = plan.control();
    control.bell.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &control.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace kv
