// The threads of an engine: workers, each with a buffer of its own, and the one that hears the readers' bells.
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lz4.h"
#include "memory.h"
#include "plan_state.h"

namespace kv {
namespace {

constexpr std::uint64_t kBurst = 8u << 20;  // bytes that an owner who was away may be served before the others

enum class Read { well, stale, bad };

// What one worker has to itself: pages that reads land in, and room to decode a slice.
struct Room {
    explicit Room(std::size_t nbytes) : size(nbytes) {
        void* const made = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED) return;
        madvise(made, nbytes, MADV_HUGEPAGE);
        pages = static_cast<std::uint8_t*>(made);
    }
    ~Room() {
        if (pages != nullptr) munmap(pages, size);
    }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

    std::uint8_t* pages = nullptr;
    std::size_t size;
    std::vector<std::uint8_t> split, joined;
};

std::uint64_t version_of(const PlanFile& file) { return file.version->load(std::memory_order_acquire); }

// Whole pages of a file to the room; false if they are not all there.
bool read_pages(int fd, std::uint8_t* to, std::uint64_t begin, std::uint64_t needed, std::uint64_t nbytes) {
    std::uint64_t got = 0;
    while (got < needed) {
        const ssize_t step = pread(fd, to + got, nbytes - got, static_cast<off_t>(begin + got));
        if (step < 0 && errno == EINTR) continue;
        if (step <= 0) return false;
        got += static_cast<std::uint64_t>(step);
    }
    return true;
}

// One unit from the room to the ring; false if its checksum differs.
bool land(const PlanPart& part, const std::uint8_t* data, std::uint8_t* slot, Room& room) {
    if (part.planes != 0 && part.length != part.crc_bytes) {
        room.split.resize(part.crc_bytes);
        room.joined.resize(part.crc_bytes);
        if (!lz4_decode(data, part.length, room.split.data(), part.crc_bytes)) return false;
        join_planes(room.split.data(), room.joined.data(), part.crc_bytes, part.planes);
        data = room.joined.data();
    }
    if (part.copy_bytes == part.crc_bytes) return copy_crc32c(slot + part.to, data, part.crc_bytes, 0) == part.crc;
    if (crc32c(data, part.crc_bytes, 0) != part.crc) return false;
    std::memcpy(slot + part.to, data, part.copy_bytes);
    return true;
}

class Worker {
public:
    explicit Worker(std::shared_ptr<PlanEngine::State> state) : state_(std::move(state)), room_(state_->io_bytes + 2 * kPage) {}

    void run() {
        std::unique_lock lock(state_->mutex);
        while (!state_->stopping) {
            const std::shared_ptr<Plan> plan = next();
            if (plan == nullptr) {
                state_->work.wait(lock);
                continue;
            }
            PlanChunk chunk = std::move(plan->ready.front());
            plan->ready.pop_front();
            ++plan->reading;
            charge(*plan, chunk);
            lock.unlock();
            std::uint32_t block = kNoBlock;
            const Read found = room_.pages == nullptr ? Read::bad : read(*plan, chunk, block);
            lock.lock();
            finish(*plan, std::move(chunk), found, block);
        }
    }

private:
    // The plan whose owner was served least. With the lock.
    std::shared_ptr<Plan> next() {
        std::shared_ptr<Plan> best;
        std::uint64_t least = 0;
        std::vector<PlanEvent> events;
        for (const auto& [id, plan] : state_->plans) {
            if (plan->ended || (plan->ready.empty() && !open_ready(*plan, events))) continue;
            const std::uint64_t served = served_of(plan->owner);
            if (best == nullptr || served < least) best = plan, least = served;
        }
        if (!events.empty()) {
            state_->events.insert(state_->events.end(), events.begin(), events.end());
            state_->told.notify_all();
        }
        return best;
    }

    // Open pieces until one has something to read from a file.
    bool open_ready(Plan& plan, std::vector<PlanEvent>& events) {
        while (plan.ready.empty())
            if (!open_piece(*state_, plan, events)) return false;
        return true;
    }

    std::uint64_t served_of(std::uint64_t owner) {
        const std::uint64_t floor = state_->served > kBurst ? state_->served - kBurst : 0;
        return std::max(state_->owners[owner].served, floor);
    }

    void charge(const Plan& plan, const PlanChunk& chunk) {
        const std::uint64_t before = served_of(plan.owner);
        state_->served = std::max(state_->served, before);
        state_->owners[plan.owner].served = before + (chunk.end - chunk.begin);
        ++state_->stats.reads;
        state_->stats.read_bytes += chunk.end - chunk.begin;
    }

    // Bytes of the chunk come and land, in steps of what the room holds where one unit is larger than that.
    Read read(Plan& plan, PlanChunk& chunk, std::uint32_t& block) {
        const std::uint64_t most = room_.size - 2 * kPage;
        if (version_of(chunk.file) != chunk.file.seen) return block = chunk.parts.front().block, Read::stale;
        if (chunk.end - chunk.begin > most + kPage) return read_large(plan, chunk, block);
        const PlanPart& last = chunk.parts.back();
        const std::uint64_t needed = std::max(last.offset + last.length, chunk.end - kPage) - chunk.begin;
        const bool came = read_pages(chunk.file.fd, room_.pages, chunk.begin, needed, chunk.end - chunk.begin);
        if (version_of(chunk.file) != chunk.file.seen) return block = chunk.parts.front().block, Read::stale;
        if (!came) return block = chunk.parts.front().block, Read::bad;
        if (!enter(plan)) return Read::well;
        std::uint8_t* const slot = plan.slot_memory(chunk.sequence);
        Read found = Read::well;
        for (const PlanPart& part : chunk.parts)
            if (found == Read::well && !land(part, room_.pages + (part.offset - chunk.begin), slot, room_))
                block = part.block, found = Read::bad;
        leave(plan);
        return found;
    }

    // One unit that is larger than the room. It is not coded: those are small.
    Read read_large(Plan& plan, const PlanChunk& chunk, std::uint32_t& block) {
        const PlanPart& part = chunk.parts.front();
        block = part.block;
        std::uint8_t* const slot = plan.slot_memory(chunk.sequence) + part.to;
        std::uint32_t crc = 0;
        for (std::uint64_t at = 0; at < part.length;) {
            const std::uint64_t begin = (part.offset + at) / kPage * kPage, before = part.offset + at - begin;
            const std::uint64_t size = std::min(room_.size - 2 * kPage, part.length - at);
            const std::uint64_t pages = (before + size + kPage - 1) / kPage * kPage;
            if (!read_pages(chunk.file.fd, room_.pages, begin, before + size, pages))
                return version_of(chunk.file) != chunk.file.seen ? Read::stale : Read::bad;
            if (!enter(plan)) return Read::well;
            const std::uint8_t* const data = room_.pages + before;
            const std::uint64_t copied = at >= part.copy_bytes ? 0 : std::min(size, part.copy_bytes - at);
            crc = copy_crc32c(slot + at, data, copied, crc);
            crc = crc32c(data + copied, size - copied, crc);
            leave(plan);
            at += size;
        }
        if (version_of(chunk.file) != chunk.file.seen) return Read::stale;
        return crc == part.crc ? Read::well : Read::bad;
    }

    // The ring may be written until `leave`; false if it is no more the plan's.
    bool enter(Plan& plan) {
        const std::lock_guard lock(state_->mutex);
        if (plan.ended) return false;
        ++plan.copying;
        return true;
    }

    void leave(Plan& plan) {
        const std::lock_guard lock(state_->mutex);
        if (--plan.copying == 0) state_->copied.notify_all();
    }

    void finish(Plan& plan, PlanChunk&& chunk, Read found, std::uint32_t block) {
        --plan.reading;
        if (plan.ended) {
            if (plan.closed && plan.reading == 0) tell({plan.id, PlanEventKind::drained, 0, kNoBlock, false});
            return;
        }
        if (found == Read::well) {
            state_->stats.units += chunk.parts.size();
            for (const PlanPart& part : chunk.parts) state_->stats.landed_bytes += part.copy_bytes;
            settle(plan, chunk.sequence);
            return;
        }
        ++(found == Read::stale ? state_->stats.stale : state_->stats.failed);
        const std::uint32_t sequence = chunk.sequence;
        plan.troubled.push_back(std::move(chunk));
        tell({plan.id, PlanEventKind::trouble, sequence, block, found == Read::stale});
    }

    void tell(const PlanEvent& event) {
        state_->events.push_back(event);
        state_->told.notify_all();
    }

    std::shared_ptr<PlanEngine::State> state_;
    Room room_;
};

}  // namespace

void plan_worker(std::shared_ptr<PlanEngine::State> state) {
    pthread_setname_np(pthread_self(), "kv-plan");
    Worker(state).run();
    const std::lock_guard lock(state->mutex);
    --state->threads;
    state->gone.notify_all();
}

void plan_listener(std::shared_ptr<PlanEngine::State> state) {
    for (;;) {
        epoll_event found[16];
        const int count = epoll_wait(state->poller, found, 16, -1);
        for (int i = 0; i < count; ++i) {
            std::uint64_t rung = 0;
            if (read(found[i].data.fd, &rung, sizeof rung) < 0 && errno == EBADF)
                epoll_ctl(state->poller, EPOLL_CTL_DEL, found[i].data.fd, nullptr);
        }
        const std::lock_guard lock(state->mutex);
        if (state->stopping) {
            --state->threads;
            state->gone.notify_all();
            return;
        }
        state->work.notify_all();
    }
}

}  // namespace kv
