// Counts the bytes of every tensor that torch allocates on the CPU, and refuses those that would pass a limit.
//
// It wraps torch's own allocator, which still does the work. `device.py` speaks to it through the C functions at the end.

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// Told of a block and its bytes, below 0 when it is released. It returns false to refuse the block. It is Python: it hears
// of releases only before the next allocation, for they also happen while Python is raising or collecting garbage.
using Told = bool (*)(int64_t block, int64_t bytes);

struct Block {
  int64_t number;
  int64_t bytes;
};

struct Settings {
  int64_t limit = std::numeric_limits<int64_t>::max();
  Told told = nullptr;
};

thread_local bool on_host = false;

class Ledger {
 public:
  void open(Settings settings) {
    std::lock_guard<std::mutex> held(mutex_);
    settings_ = settings;
    next_ = live_ = peak_ = refused_ = 0;
    released_.clear();
    is_open_ = true;
  }

  void close() {
    std::lock_guard<std::mutex> held(mutex_);
    is_open_ = false;
    blocks_.clear();  // they live on, but nobody counts them any more
  }

  bool counts() const {
    return is_open_ && !on_host;
  }

  Block take(size_t requested) {
    settle();
    const Block block{next_++, static_cast<int64_t>(requested)};
    const bool allowed = settings_.told == nullptr || settings_.told(block.number, block.bytes);
    if (allowed && enter(block)) {
      return block;
    }
    refuse(block, allowed);
  }

  // The hook is called without the lock: it waits for Python's, whose owner may be waiting for ours.
  void settle() {
    if (settings_.told == nullptr) {
      return;
    }
    std::vector<Block> released;
    {
      std::lock_guard<std::mutex> held(mutex_);
      released.swap(released_);
    }
    for (const Block& block : released) {
      settings_.told(block.number, -block.bytes);
    }
  }

  void keep(void* pointer, Block block) {
    std::lock_guard<std::mutex> held(mutex_);
    if (is_open_) {
      blocks_[pointer] = block;
    }
  }

  void drop(void* pointer) {
    std::lock_guard<std::mutex> held(mutex_);
    const auto found = blocks_.find(pointer);
    if (found != blocks_.end()) {  // else it is older than the ledger
      leave(found->second);
      blocks_.erase(found);
    }
  }

  void undo(Block block) {
    std::lock_guard<std::mutex> held(mutex_);
    leave(block);
  }

  int64_t live() {
    std::lock_guard<std::mutex> held(mutex_);
    return live_;
  }

  int64_t peak() {
    std::lock_guard<std::mutex> held(mutex_);
    return peak_;
  }

  int64_t refused() {
    std::lock_guard<std::mutex> held(mutex_);
    return refused_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> held(mutex_);
    peak_ = live_;
  }

  void set_limit(int64_t limit) {
    std::lock_guard<std::mutex> held(mutex_);
    settings_.limit = limit;
  }

 private:
  bool enter(Block block) {
    std::lock_guard<std::mutex> held(mutex_);
    if (block.bytes > settings_.limit - live_) {
      return false;
    }
    live_ += block.bytes;
    peak_ = std::max(peak_, live_);
    return true;
  }

  void leave(Block block) {
    live_ -= block.bytes;
    tell_later(block);
  }

  void tell_later(Block block) {
    if (settings_.told != nullptr) {
      released_.push_back(block);
    }
  }

  [[noreturn]] void refuse(Block block, bool allowed) {
    int64_t live = 0, limit = 0;
    {
      std::lock_guard<std::mutex> held(mutex_);
      if (allowed) {
        tell_later(block);
      }
      ++refused_;
      live = live_;
      limit = settings_.limit;
    }
    const auto why = allowed ? "of a limit of " + std::to_string(limit) : std::string("but its allocator refuses");
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "Limited device out of memory. Tried to allocate ", block.bytes, " bytes; ", live, " are live, ", why, ".");
    std::abort();  // not reached: the line above throws
  }

  std::mutex mutex_;
  std::atomic<bool> is_open_{false};
  std::atomic<int64_t> next_{0};
  Settings settings_;
  int64_t live_ = 0, peak_ = 0, refused_ = 0;
  std::unordered_map<void*, Block> blocks_;
  std::vector<Block> released_;  // which the hook has not been told of
};

// Never destroyed: tensors may be released while the process ends.
Ledger& ledger() {
  static auto* one = new Ledger;
  return *one;
}

class Counting final : public c10::Allocator {
 public:
  explicit Counting(c10::Allocator* inner) : inner_(inner) {
    inner_deleter = inner->raw_deleter();
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes != 0 && ledger().counts() ? counted(bytes) : inner_->raw_allocate(bytes);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  void* counted(size_t bytes) {
    const Block block = ledger().take(bytes);
    void* pointer = nullptr;
    try {
      pointer = inner_->raw_allocate(bytes);
    } catch (...) {
      ledger().undo(block);
      throw;
    }
    ledger().keep(pointer, block);
    return pointer;
  }

  // It forgets the block before the memory is free: another thread may be given the same address at once.
  static void release(void* pointer) {
    ledger().drop(pointer);
    inner_deleter(pointer);
  }

  static inline c10::DeleterFnPtr inner_deleter = nullptr;
  c10::Allocator* inner_;
};

}  // namespace

extern "C" {

void limited_install() {
  c10::SetCPUAllocator(new Counting(c10::GetCPUAllocator()), std::numeric_limits<uint8_t>::max());
}

void limited_open(int64_t limit, Told told) {
  ledger().open({limit, told});
}

void limited_close() {
  ledger().close();
}

bool limited_on_host(bool now) {
  return std::exchange(on_host, now);
}

void limited_settle() {
  ledger().settle();
}

int64_t limited_live() {
  return ledger().live();
}

int64_t limited_peak() {
  return ledger().peak();
}

int64_t limited_refused() {
  return ledger().refused();
}

void limited_reset_peak() {
  ledger().reset_peak();
}

void limited_set_limit(int64_t limit) {
  ledger().set_limit(limit);
}
}
