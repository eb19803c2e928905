// Inside of plans.h: what the lock of an engine guards. Included by the plan_*.cpp files only.
#pragma once

#include "plans.h"

namespace kv {

constexpr std::uint64_t kGapMax = 65536;  // bytes nobody asked for that are read rather than skipped
constexpr std::uint64_t kPage = 4096;

enum class BlockState : std::uint8_t { absent, on_file, elsewhere };

struct PlanBlock {
    std::uint64_t row = ~std::uint64_t{0};  // of its first unit in the columns
    std::int32_t file = -1;
    BlockState state = BlockState::absent;
    std::uint8_t kind = 0, planes = 0;
};

// Positions of a pass that follow one another, are all there and of one kind.
struct PlanRun {
    std::uint32_t first, count, kind;
};

struct PlanPass {
    std::uint32_t id, layer, layer_end;
    std::vector<std::uint32_t> blocks;  // empty: position and block are the same
    std::vector<PlanRun> runs;
    std::size_t run = 0;
    std::uint32_t at = 0;  // in the run

    std::uint32_t block(std::uint32_t position) const { return blocks.empty() ? position : blocks[position]; }
};

struct PlanSlot {
    std::uint32_t sequence = 0, pending = 0;
    std::vector<PlanFill> fills;
};


struct Plan {
    std::uint64_t id = 0, owner = 0;
    PlanRing ring{};
    std::vector<PlanKind> kinds;
    std::vector<PlanBlock> blocks;
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint32_t> lengths, crcs;
    std::vector<PlanFile> files;

    std::deque<PlanPass> passes;
    std::uint32_t passes_made = 0, opened = 0, landed = 0, done = 0;
    std::vector<PlanSlot> slots;
    std::deque<PlanChunk> ready;
    std::vector<PlanChunk> troubled;
    int reading = 0, copying = 0;
    bool ended = false, closed = false;

    PlanControl& control() const { return *reinterpret_cast<PlanControl*>(ring.memory); }
    PlanPiece& piece(std::uint32_t sequence) const {
        return reinterpret_cast<PlanPiece*>(ring.memory + 64)[sequence % ring.slots];
    }
    std::uint8_t* slot_memory(std::uint32_t sequence) const {
        return ring.memory + kPlanControlBytes + (sequence % ring.slots) * ring.slot_bytes;
    }
    PlanSlot& slot(std::uint32_t sequence) { return slots[sequence % ring.slots]; }
    // Pieces of one layer of a run, in blocks.
    std::uint32_t blocks_a_piece(std::uint32_t kind, std::uint32_t layer) const {
        return static_cast<std::uint32_t>(ring.slot_bytes / kinds[kind].slice_bytes[layer]);
    }
};

struct PlanOwner {
    std::uint64_t served = 0;  // bytes, or as many as others had when it came back
};

struct PlanEngine::State {
    std::mutex mutex;
    std::condition_variable work, copied, told, gone;
    std::map<std::uint64_t, std::shared_ptr<Plan>> plans;
    std::map<std::uint64_t, PlanOwner> owners;
    std::uint64_t next_plan = 1, served = 0;
    std::deque<PlanEvent> events;
    PlanStats stats;
    std::size_t io_bytes = 0;
    int threads = 0, poller = -1, stop_bell = -1;
    bool stopping = false;
};

// All with the engine's lock held.

// Cut the next piece of a plan into reads, if there is one and a slot for it. False if there is nothing to read now.
bool open_piece(PlanEngine::State& state, Plan& plan, std::vector<PlanEvent>& events);
// Join parts, as far as they lie in order, to reads of at most `io_bytes` (one part may be larger).
std::uint32_t cut_chunks(Plan& plan, std::uint32_t sequence, std::vector<PlanPart>& parts, std::size_t io_bytes);
// What a part is by now: a block's file may be another than when the part was made.
void renew_part(const Plan& plan, PlanPart& part);
std::vector<PlanRun> runs_of(const Plan& plan, const PlanPass& pass);
std::uint64_t pieces_of(const Plan& plan, const PlanPass& pass);
// A read of a piece has ended well.
void settle(Plan& plan, std::uint32_t sequence);
void end_plan(Plan& plan, std::uint32_t reason, std::uint32_t block);
void wake_reader(const Plan& plan);

void plan_worker(std::shared_ptr<PlanEngine::State> state);
void plan_listener(std::shared_ptr<PlanEngine::State> state);

}  // namespace kv
