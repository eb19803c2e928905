// The pool: one loop at a time, items handed out by an atomic counter, workers asleep in between.
//
// State under `mutex_`: job_, epoch_, running_, stopping_. `turn_` lets one caller at a time own the pool; whoever
// does not get it runs its loop alone rather than wait. The pool object is never destroyed: joining threads during
// interpreter exit can hang, and their memory goes with the process.
#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace kv {
namespace {

int affinity_count() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    const int count = CPU_COUNT(&set);
    return count > 0 ? count : 1;
}

struct Job {
    const std::function<void(int)>& body;
    int items;
    std::atomic<int> next{0};

    void drain() {
        for (int item = next.fetch_add(1); item < items; item = next.fetch_add(1)) body(item);
    }
};

class Pool {
public:
    explicit Pool(int threads) : count_(threads), owner_(getpid()) {
        for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { serve(); });
    }

    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    int count() const { return count_; }
    bool is_ours() const { return owner_ == getpid(); }

    void run(Job& job) {
        {
            const std::lock_guard lock(mutex_);
            job_ = &job;
            ++epoch_;
        }
        wake_.notify_all();
        job.drain();
        std::unique_lock lock(mutex_);
        // Workers that have not woken yet find no job: on a busy machine waiting for them would take milliseconds.
        job_ = nullptr;
        done_.wait(lock, [this] { return running_ == 0; });
    }

private:
    void serve() {
        unsigned seen = 0;
        for (;;) {
            Job* job = nullptr;
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [&] { return stopping_ || epoch_ != seen; });
                if (stopping_) return;
                seen = epoch_;
                if (job_ == nullptr) continue;
                job = job_;
                ++running_;
            }
            job->drain();
            const std::lock_guard lock(mutex_);
            if (--running_ == 0) done_.notify_one();
        }
    }

    const int count_;
    const pid_t owner_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Job* job_ = nullptr;
    unsigned epoch_ = 0;
    int running_ = 0;
    bool stopping_ = false;
};

std::mutex& turn() {
    static std::mutex* mutex = new std::mutex;
    return *mutex;
}

std::atomic<int> wanted_count{0};
Pool* pool = nullptr;  // under turn()

}  // namespace

int thread_count() {
    const int count = wanted_count.load();
    return count > 0 ? count : affinity_count();
}

void set_thread_count(int count) {
    const std::lock_guard lock(turn());
    wanted_count = count;
    if (pool == nullptr || pool->count() == count) return;
    if (pool->is_ours()) {
        pool->stop();
        delete pool;
    }
    pool = nullptr;
}

void parallel_for(int items, const std::function<void(int)>& body) {
    Job job{body, items};
    if (items > 1 && thread_count() > 1) {
        std::unique_lock lock(turn(), std::try_to_lock);
        // A child of fork has the parent's pool object without its threads: it makes a new one and leaves that.
        if (lock.owns_lock()) {
            if (pool == nullptr || !pool->is_ours()) pool = new Pool(thread_count());
            pool->run(job);
            return;
        }
    }
    job.drain();
}

}  // namespace kv
