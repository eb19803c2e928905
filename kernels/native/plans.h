// Reading plans: threads that read the slices of a plan from files, piece by piece, into a ring that a reader shares.
//
// A *plan* is a list of blocks, and for each of its units (layers, mostly) a file, an offset, a length and a CRC-32C. A
// *pass* reads some layers of all blocks, or of some. It is cut into *pieces*: one layer of some blocks, in order, dense,
// as large as a slot of the ring. Pieces land in order as far as the reader is told, and at most as many are ahead of it
// as the ring has slots: what it gives back (`done`) is the credit for the next.
//
// Bytes go through a thread's own buffer: the ring is written only while the plan lives, from bytes whose file had the
// same version before and after the read, and a piece counts as landed once the checksums of all its units agree.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace kv {

constexpr std::uint32_t kPlanMagic = 0x314C504Bu;   // "KPL1"
constexpr std::size_t kPlanControlBytes = 4096;     // before the first slot
constexpr std::uint32_t kPlanSlotsMax = 62;
constexpr std::size_t kPlanPassesMax = 64;          // queued at one time
constexpr std::size_t kPlanQueuedMax = 1u << 20;    // blocks that queued passes name, together
constexpr std::uint32_t kNoBlock = 0xFFFFFFFFu;

// The head of a ring, in memory that both sides write: `done` is the reader's, all else the daemon's. The daemon believes
// nothing of it but `done`, and that within bounds.
struct PlanControl {
    std::atomic<std::uint32_t> magic;
    std::atomic<std::uint32_t> bell;    // counts changes of what follows: what the reader sleeps on
    std::atomic<std::uint32_t> landed;  // pieces, modulo 2^32
    std::atomic<std::uint32_t> done;
    std::atomic<std::uint32_t> hungry;  // the daemon wants its bell rung at the next `done`
    std::atomic<std::uint32_t> state;   // 0, or 1: the plan has ended
    std::atomic<std::uint32_t> reason;  // why it ended
    std::atomic<std::uint32_t> block;   // which block was the reason, or kNoBlock
};

// What the reader is told of a piece, 64 bytes each behind the first 64 of the ring.
struct PlanPiece {
    std::uint32_t sequence, pass, layer, first, count, slice_bytes, codec, reserved[9];
};
static_assert(sizeof(PlanPiece) == 64 && 64 + kPlanSlotsMax * sizeof(PlanPiece) <= kPlanControlBytes);

// How blocks of one codec are cut. `first_unit` has an entry more than layers; layers and units count from the plan's first.
struct PlanKind {
    std::vector<std::uint32_t> first_unit, slice_bytes, codec;
    std::uint32_t unit_bytes = 0, unit_stride = 0;
};

struct PlanFile {
    int fd;
    const std::atomic<std::uint64_t>* version;
    std::uint64_t seen;
};

struct PlanRing {
    std::uint8_t* memory;  // kPlanControlBytes, then the slots
    std::uint32_t slots;
    std::size_t slot_bytes;
};

struct PlanPart {
    std::uint64_t offset, to;  // in the file; in the slot
    std::uint32_t length, crc, crc_bytes, copy_bytes, block, unit;
    std::uint8_t planes;
};

// One read of consecutive pages of a file, and what of it goes where.
struct PlanChunk {
    std::uint32_t sequence = 0;
    PlanFile file{};
    std::uint64_t begin = 0, end = 0;
    std::vector<PlanPart> parts;
};

enum class PlanEventKind { trouble, fill, drained };

// What native code can not settle by itself. `block` is the one whose read failed; `stale`: its file was given to others.
struct PlanEvent {
    std::uint64_t plan;
    PlanEventKind kind;
    std::uint32_t sequence, block;
    bool stale;
};

// A block of a piece that no file holds: its layer is wanted at `to` of the slot.
struct PlanFill {
    std::uint32_t block, layer;
    std::uint64_t to;
};

struct PlanColumns {
    std::vector<std::uint32_t> blocks;
    std::uint32_t kind;
    std::vector<PlanFile> files;
    std::vector<std::int32_t> file;  // by block, -1: no file has it
    std::vector<std::uint8_t> planes;
    const std::uint64_t* offsets = nullptr;  // [blocks, units]
    const std::uint32_t* lengths = nullptr;
    const std::uint32_t* crcs = nullptr;
};

struct PlanPassed {
    std::uint32_t pass;
    std::uint64_t pieces;
};

struct PlanStats {
    std::uint64_t reads = 0, read_bytes = 0, units = 0, landed_bytes = 0, stale = 0, failed = 0;
};

// All plans of one store. Methods are thread-safe; those that name a plan which has ended throw std::out_of_range.
class PlanEngine {
public:
    struct State;  // plan_state.h

    PlanEngine(int threads, std::size_t io_bytes);
    ~PlanEngine();
    PlanEngine(const PlanEngine&) = delete;
    PlanEngine& operator=(const PlanEngine&) = delete;

    // Wait for up to `seconds` for the threads; one that is stuck in a read is left behind.
    void stop(double seconds);
    void add_bell(int fd);
    void remove_bell(int fd);

    std::uint64_t open(std::uint64_t owner, const PlanRing& ring, std::vector<PlanKind> kinds);
    std::uint32_t add_blocks(std::uint64_t plan, std::uint32_t count);
    // `units` is what each block's rows have; std::invalid_argument if the plan's blocks of that kind have others.
    void set_blocks(std::uint64_t plan, const PlanColumns& columns, std::size_t units);
    // Blocks whose file has another version by now.
    std::vector<std::uint32_t> stale_blocks(std::uint64_t plan);
    // Queue a pass over layers of all blocks, or of these. std::overflow_error where too much is queued.
    PlanPassed begin(std::uint64_t plan, std::uint32_t layer, std::uint32_t layer_end, const std::vector<std::uint32_t>* blocks);
    void drop(std::uint64_t plan);
    void retry(std::uint64_t plan);
    void fail(std::uint64_t plan, std::uint32_t reason, std::uint32_t block);
    // End it; true if no read is under way any more, else a `drained` event tells when.
    bool close(std::uint64_t plan, std::uint32_t reason);
    // Pieces that the reader gave back.
    std::uint32_t progress(std::uint64_t plan);

    std::vector<PlanEvent> events(double seconds);
    std::vector<PlanFill> fills(std::uint64_t plan, std::uint32_t sequence);
    // Copy a slice that no file had into its place; false if the plan has ended.
    bool fill(std::uint64_t plan, std::uint32_t sequence, std::uint64_t to, const std::uint8_t* data, std::size_t size);
    void filled(std::uint64_t plan, std::uint32_t sequence);
    PlanStats stats();

private:
    std::shared_ptr<State> state_;
};

struct PlanSeen {
    std::uint32_t landed, state, reason, block;
};

// The reader's half: wait until so many pieces have landed, the plan has ended, or the time is over.
PlanSeen plan_wait(const PlanControl& control, std::uint32_t landed, double seconds);
// Say how many pieces were given back, and wake the daemon by `bell` if it waits for that.
void plan_done(PlanControl& control, std::uint32_t done, int bell);

}  // namespace kv
