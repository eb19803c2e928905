// The calls of an engine; what they share with its threads is in plan_state.h.
#include "plans.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "plan_state.h"

namespace kv {
namespace {

constexpr std::size_t kIoBytesMin = 2u << 20;  // a coded slice, at most 1 MiB, always fits one read

std::shared_ptr<Plan> found(PlanEngine::State& state, std::uint64_t id) {
    const auto at = state.plans.find(id);
    if (at == state.plans.end()) throw std::out_of_range("no such plan");
    return at->second;
}

Plan& living(const std::shared_ptr<Plan>& plan) {
    if (plan->ended) throw std::out_of_range("the plan has ended");
    return *plan;
}

void hear(int poller, int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

// Threads without signals, which are Python's main thread's.
void start(void (*body)(std::shared_ptr<PlanEngine::State>), const std::shared_ptr<PlanEngine::State>& state) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    ++state->threads;
    std::thread(body, state).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::chrono::duration<double> span(double seconds) { return std::chrono::duration<double>(seconds); }

}  // namespace

PlanEngine::PlanEngine(int threads, std::size_t io_bytes) : state_(std::make_shared<State>()) {
    state_->io_bytes = std::max(io_bytes, kIoBytesMin) / kPage * kPage;
    state_->poller = epoll_create1(EPOLL_CLOEXEC);
    state_->stop_bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (state_->poller < 0 || state_->stop_bell < 0) throw std::runtime_error("no descriptors for reading plans");
    hear(state_->poller, state_->stop_bell);
    const std::lock_guard lock(state_->mutex);
    for (int i = 0; i < threads; ++i) start(plan_worker, state_);
    start(plan_listener, state_);
}

PlanEngine::~PlanEngine() { stop(1.0); }

void PlanEngine::stop(double seconds) {
    std::unique_lock lock(state_->mutex);
    if (!state_->stopping) {
        state_->stopping = true;
        for (const auto& [id, plan] : state_->plans) end_plan(*plan, 0, kNoBlock);
        state_->copied.wait(lock, [this] {
            for (const auto& [id, plan] : state_->plans)
                if (plan->copying != 0) return false;
            return true;
        });
        eventfd_write(state_->stop_bell, 1);
        state_->work.notify_all();
        state_->told.notify_all();
    }
    if (!state_->gone.wait_for(lock, span(seconds), [this] { return state_->threads == 0; })) return;
    for (int* fd : {&state_->poller, &state_->stop_bell})
        if (*fd >= 0) {
            ::close(*fd);
            *fd = -1;
        }
}

void PlanEngine::add_bell(int fd) { hear(state_->poller, fd); }

void PlanEngine::remove_bell(int fd) { epoll_ctl(state_->poller, EPOLL_CTL_DEL, fd, nullptr); }

std::uint64_t PlanEngine::open(std::uint64_t owner, const PlanRing& ring, std::vector<PlanKind> kinds) {
    if (ring.slots < 1 || ring.slots > kPlanSlotsMax) throw std::invalid_argument("slots is out of range");
    for (const PlanKind& kind : kinds)
        for (const std::uint32_t nbytes : kind.slice_bytes)
            if (nbytes > ring.slot_bytes) throw std::invalid_argument("a slice is larger than a slot");
    const auto plan = std::make_shared<Plan>();
    plan->owner = owner;
    plan->ring = ring;
    plan->kinds = std::move(kinds);
    plan->slots.resize(ring.slots);
    std::memset(ring.memory, 0, kPlanControlBytes);
    plan->control().block = kNoBlock;
    plan->control().magic = kPlanMagic;
    const std::lock_guard lock(state_->mutex);
    if (state_->stopping) throw std::out_of_range("the engine has stopped");
    plan->id = state_->next_plan++;
    state_->plans.emplace(plan->id, plan);
    return plan->id;
}

std::uint32_t PlanEngine::add_blocks(std::uint64_t id, std::uint32_t count) {
    const std::lock_guard lock(state_->mutex);
    Plan& plan = living(found(*state_, id));
    const auto first = static_cast<std::uint32_t>(plan.blocks.size());
    plan.blocks.resize(plan.blocks.size() + count);
    return first;
}

void PlanEngine::set_blocks(std::uint64_t id, const PlanColumns& columns, std::size_t given) {
    const std::lock_guard lock(state_->mutex);
    Plan& plan = living(found(*state_, id));
    const std::uint64_t units = plan.kinds.at(columns.kind).first_unit.back();
    for (const std::int32_t file : columns.file)
        if (file >= 0 && given != units) throw std::invalid_argument("columns have other units than the plan");
    const auto base = static_cast<std::int32_t>(plan.files.size());
    plan.files.insert(plan.files.end(), columns.files.begin(), columns.files.end());
    for (std::size_t i = 0; i < columns.blocks.size(); ++i) {
        PlanBlock& block = plan.blocks.at(columns.blocks[i]);
        if (block.state != BlockState::absent && block.kind != columns.kind) throw std::invalid_argument("a block changes its kind");
        block.kind = static_cast<std::uint8_t>(columns.kind);
        block.planes = columns.planes[i];
        block.state = columns.file[i] < 0 ? BlockState::elsewhere : BlockState::on_file;
        block.file = columns.file[i] < 0 ? -1 : base + columns.file[i];
        if (columns.file[i] < 0) continue;
        if (block.row == ~std::uint64_t{0}) {
            block.row = plan.offsets.size();
            plan.offsets.resize(block.row + units);
            plan.lengths.resize(block.row + units);
            plan.crcs.resize(block.row + units);
        }
        std::copy_n(columns.offsets + i * units, units, plan.offsets.begin() + block.row);
        std::copy_n(columns.lengths + i * units, units, plan.lengths.begin() + block.row);
        std::copy_n(columns.crcs + i * units, units, plan.crcs.begin() + block.row);
    }
}

std::vector<std::uint32_t> PlanEngine::stale_blocks(std::uint64_t id) {
    const std::lock_guard lock(state_->mutex);
    const Plan& plan = living(found(*state_, id));
    std::vector<bool> stale;
    bool any = false;
    for (const PlanFile& file : plan.files) {
        stale.push_back(file.version->load(std::memory_order_acquire) != file.seen);
        any = any || stale.back();
    }
    std::vector<std::uint32_t> blocks;
    for (std::uint32_t i = 0; any && i < plan.blocks.size(); ++i)
        if (plan.blocks[i].state == BlockState::on_file && stale[plan.blocks[i].file]) blocks.push_back(i);
    return blocks;
}

PlanPassed PlanEngine::begin(std::uint64_t id, std::uint32_t layer, std::uint32_t layer_end, const std::vector<std::uint32_t>* blocks) {
    const std::lock_guard lock(state_->mutex);
    Plan& plan = living(found(*state_, id));
    if (blocks != nullptr)
        for (const std::uint32_t block : *blocks)
            if (plan.blocks.at(block).state == BlockState::absent) throw std::invalid_argument("a block is not in the plan");
    std::size_t queued = blocks == nullptr ? 0 : blocks->size();
    for (const PlanPass& other : plan.passes) queued += other.blocks.size();
    if (plan.passes.size() >= kPlanPassesMax || queued > kPlanQueuedMax) throw std::overflow_error("too much is queued");
    PlanPass pass{};
    pass.layer = layer;
    pass.layer_end = layer_end;
    if (blocks != nullptr) pass.blocks = *blocks;
    if (blocks == nullptr || !blocks->empty()) pass.runs = runs_of(plan, pass);
    const PlanPassed passed{pass.id = ++plan.passes_made, pieces_of(plan, pass)};
    plan.passes.push_back(std::move(pass));
    state_->work.notify_all();
    return passed;
}

void PlanEngine::drop(std::uint64_t id) {
    const std::lock_guard lock(state_->mutex);
    living(found(*state_, id)).passes.clear();
}

void PlanEngine::retry(std::uint64_t id) {
    const std::lock_guard lock(state_->mutex);
    Plan& plan = living(found(*state_, id));
    std::vector<PlanChunk> troubled;
    troubled.swap(plan.troubled);
    for (PlanChunk& chunk : troubled) {
        // Blocks that no file has any more are asked for as fills.
        std::vector<PlanPart> parts;
        PlanSlot& slot = plan.slot(chunk.sequence);
        for (PlanPart& part : chunk.parts) {
            if (plan.blocks[part.block].state != BlockState::on_file) continue;
            renew_part(plan, part);
            parts.push_back(part);
        }
        if (parts.size() != chunk.parts.size()) {
            end_plan(plan, 0, chunk.parts.front().block);
            return;
        }
        slot.pending += cut_chunks(plan, chunk.sequence, parts, state_->io_bytes) - 1;
    }
    state_->work.notify_all();
}

void PlanEngine::fail(std::uint64_t id, std::uint32_t reason, std::uint32_t block) {
    const std::lock_guard lock(state_->mutex);
    end_plan(*found(*state_, id), reason, block);
}

bool PlanEngine::close(std::uint64_t id, std::uint32_t reason) {
    std::unique_lock lock(state_->mutex);
    const std::shared_ptr<Plan> plan = found(*state_, id);
    end_plan(*plan, reason, kNoBlock);
    state_->copied.wait(lock, [&plan] { return plan->copying == 0; });
    state_->plans.erase(id);
    bool last = true;
    for (const auto& [number, other] : state_->plans) last = last && other->owner != plan->owner;
    if (last) state_->owners.erase(plan->owner);
    plan->closed = true;
    return plan->reading == 0;
}

std::uint32_t PlanEngine::progress(std::uint64_t id) {
    const std::lock_guard lock(state_->mutex);
    return found(*state_, id)->control().done.load(std::memory_order_relaxed);
}

std::vector<PlanEvent> PlanEngine::events(double seconds) {
    std::unique_lock lock(state_->mutex);
    state_->told.wait_for(lock, span(seconds), [this] { return !state_->events.empty() || state_->stopping; });
    std::vector<PlanEvent> told(state_->events.begin(), state_->events.end());
    state_->events.clear();
    return told;
}

std::vector<PlanFill> PlanEngine::fills(std::uint64_t id, std::uint32_t sequence) {
    const std::lock_guard lock(state_->mutex);
    return living(found(*state_, id)).slot(sequence).fills;
}

bool PlanEngine::fill(std::uint64_t id, std::uint32_t sequence, std::uint64_t to, const std::uint8_t* data, std::size_t size) {
    std::unique_lock lock(state_->mutex);
    const auto at = state_->plans.find(id);
    if (at == state_->plans.end() || at->second->ended) return false;
    Plan& plan = *at->second;
    if (to > plan.ring.slot_bytes || size > plan.ring.slot_bytes - to) throw std::invalid_argument("a fill leaves its slot");
    ++plan.copying;
    const std::shared_ptr<Plan> kept = at->second;
    lock.unlock();
    std::memcpy(plan.slot_memory(sequence) + to, data, size);
    lock.lock();
    if (--plan.copying == 0) state_->copied.notify_all();
    return true;
}

void PlanEngine::filled(std::uint64_t id, std::uint32_t sequence) {
    const std::lock_guard lock(state_->mutex);
    Plan& plan = living(found(*state_, id));
    plan.slot(sequence).fills.clear();
    settle(plan, sequence);
    state_->work.notify_all();
}

PlanStats PlanEngine::stats() {
    const std::lock_guard lock(state_->mutex);
    return state_->stats;
}

PlanSeen plan_wait(const PlanControl& control, std::uint32_t landed, double seconds) {
    const auto until = std::chrono::steady_clock::now() + span(seconds);
    for (;;) {
        const std::uint32_t bell = control.bell.load(std::memory_order_seq_cst);
        const std::uint32_t state = control.state.load(std::memory_order_acquire);
        const std::uint32_t now = control.landed.load(std::memory_order_acquire);
        const double left = std::chrono::duration<double>(until - std::chrono::steady_clock::now()).count();
        if (static_cast<std::int32_t>(now - landed) >= 0 || state != 0 || left <= 0)
            return {now, state, control.reason.load(std::memory_order_relaxed), control.block.load(std::memory_order_relaxed)};
        timespec wait{static_cast<time_t>(left), static_cast<long>((left - static_cast<double>(static_cast<time_t>(left))) * 1e9)};
        syscall(SYS_futex, &control.bell, FUTEX_WAIT, bell, &wait, nullptr, 0);
    }
}

void plan_done(PlanControl& control, std::uint32_t done, int bell) {
    control.done.store(done, std::memory_order_seq_cst);
    if (control.hungry.load(std::memory_order_seq_cst) != 0) {
        control.hungry.store(0, std::memory_order_seq_cst);
        eventfd_write(bell, 1);
    }
}

}  // namespace kv
