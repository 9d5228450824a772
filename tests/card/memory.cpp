// The memory of simulated cards: a limit to the byte, under the rules of torch's caching allocator, and pinned memory.
//
// The rules are those of c10/cuda/CUDACachingAllocator.cpp, whose constants are named; pinned blocks are powers of two
// and are not used again while a copy awaits them, as in ATen/core/CachingHostAllocator.h.

#include "card.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

namespace card {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kSpan = size_t{1} << 37;  // addresses of a card
constexpr size_t kMinBlockSize = 512, kSmallSize = kMiB, kSmallBuffer = 2 * kMiB, kLargeBuffer = 20 * kMiB;
constexpr size_t kMinLargeAlloc = 10 * kMiB, kRoundLarge = 2 * kMiB;

size_t up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

char* reserve_addresses(int protection) {
  void* start = mmap(nullptr, kSpan * kMostCards, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "no addresses are left for a simulated card");
  return static_cast<char*>(start);
}

char* addresses() {  // that tensors have; nobody can read there
  static char* start = reserve_addresses(PROT_NONE);
  return start;
}

char* backing() {  // their bytes
  static char* start = reserve_addresses(PROT_READ | PROT_WRITE);
  return start;
}

enum class State { live, cached, unmapped };

struct Block {
  int card = 0, stream = 0;
  bool large = false, expandable = false;
  State state = State::cached;
  size_t at = 0, size = 0, requested = 0;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  std::set<int> used_in;                      // other streams
  std::vector<std::pair<int, uint64_t>> awaits;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->size != b->size ? a->size < b->size : a->at < b->at;
  }
};

using Pool = std::set<Block*, BySize>;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

void change(StatArray& stats, bool large, int64_t by) {
  for (size_t kind : {size_t{0}, size_t{large ? 2u : 1u}})
    by < 0 ? stats[kind].decrease(-by) : stats[kind].increase(by);
}

struct Card {
  size_t total = size_t{1} << 34, outside = 0;
  double fraction = 1.0;
  bool expandable = false;
  Pool pools[2];
  std::map<size_t, size_t> holes{{0, kSpan / 2}};                // addresses of no segment
  std::map<std::pair<int, bool>, std::vector<Block*>> unmapped;  // by stream and pool, in order of addresses
  std::unordered_map<const void*, Block*> live;
  std::vector<Block*> awaiting;  // freed, but another stream may still use them
  size_t next_expandable = up(kSpan / 2, kLargeBuffer);  // pages are counted from there
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t allocations = 0, refuse_at = -1, refuse_times = 0, refused = 0;

  size_t reserved() const { return stats.reserved_bytes[0].current; }
};

Card cards[kMostCards];

char* address_of(const Block* block) { return addresses() + block->card * kSpan + block->at; }

Block* cut(Block* block, size_t size) {
  auto* rest = new Block();
  rest->card = block->card, rest->stream = block->stream, rest->large = block->large;
  rest->expandable = block->expandable, rest->state = block->state;
  rest->at = block->at + size, rest->size = block->size - size;
  rest->before = block, rest->after = block->after;
  if (block->after) block->after->before = rest;
  block->after = rest, block->size = size;
  return rest;
}

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int at = current_card();
    c10::Device device(kType, static_cast<c10::DeviceIndex>(at));
    if (bytes == 0) return {nullptr, nullptr, &give_back, device};
    std::lock_guard<std::recursive_mutex> held(lock());
    Block* block = take(cards[at], at, bytes);
    char* address = address_of(block);
    cards[at].live[address] = block;
    if (settings().poison) std::memset(real_bytes(address), 0xFF, std::min(block->size, size_t{4096}));
    return {address, address, &give_back, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memmove(real_bytes(to), real_bytes(from), bytes);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    for (int at = 0; at < settings().count; ++at) empty(cards[at], at);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    if (data.get() == nullptr) return;
    auto& live = cards[card_of(data.get())].live;
    auto found = live.find(data.get());
    if (found != live.end() && found->second->stream != stream.id()) found->second->used_in.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex at) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    return cards[at].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex at) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    cards[at].stats.num_alloc_retries = cards[at].stats.num_ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex at) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    auto& stats = cards[at].stats;
    for (StatArray* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes,
                            &stats.allocation, &stats.segment, &stats.active})
      for (Stat& stat : *each) stat.reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex at) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    Card& card = cards[at];
    const size_t used = card.reserved() + card.outside;
    return {card.total > used ? card.total - used : 0, card.total};
  }

 private:
  static void give_back(void* address) {
    if (address == nullptr) return;
    std::lock_guard<std::recursive_mutex> held(lock());
    Card& card = cards[card_of(address)];
    Block* block = card.live.at(address);
    card.live.erase(address);
    change(card.stats.allocated_bytes, block->large, -static_cast<int64_t>(block->size));
    change(card.stats.requested_bytes, block->large, -static_cast<int64_t>(block->requested));
    change(card.stats.allocation, block->large, -1);
    for (int stream : block->used_in) block->awaits.emplace_back(stream, enqueued(block->card, stream));
    block->used_in.clear();
    if (block->awaits.empty()) keep(card, block);
    else card.awaiting.push_back(block);
  }

  static void keep(Card& card, Block* block) {  // free_block
    change(card.stats.active_bytes, block->large, -static_cast<int64_t>(block->size));
    block->state = State::cached;
    merge(card, block);
    card.pools[block->large].insert(block);
  }

  static void merge(Card& card, Block* block) {  // try_merge_blocks
    for (Block* other : {block->before, block->after}) {
      if (other == nullptr || other->state != block->state) continue;
      if (block->state == State::cached) card.pools[block->large].erase(other);
      else forget(card, other);
      if (other == block->before) {
        block->at = other->at, block->before = other->before;
        if (other->before) other->before->after = block;
      } else {
        block->after = other->after;
        if (other->after) other->after->before = block;
      }
      block->size += other->size;
      delete other;
    }
  }

  static void settle(Card& card, int at, bool wait) {  // process_events, synchronize_and_free_events
    auto freed = std::partition(card.awaiting.begin(), card.awaiting.end(), [&](Block* block) {
      for (auto& [stream, place] : block->awaits) {
        if (wait) drain(at, stream, place);
        if (!has_reached(at, stream, place)) return true;
      }
      return false;
    });
    std::vector<Block*> blocks(freed, card.awaiting.end());
    card.awaiting.erase(freed, card.awaiting.end());
    for (Block* block : blocks) block->awaits.clear(), keep(card, block);
  }

  static Block* take(Card& card, int at, size_t bytes) {  // malloc
    settle(card, at, false);
    const size_t size = up(std::max(bytes, kMinBlockSize), kMinBlockSize);
    const bool large = size > kSmallSize;
    if (++card.allocations; card.refuse_at >= 0 && card.allocations > card.refuse_at && card.refuse_times > 0) {
      if (--card.refuse_times == 0) card.refuse_at = -1;
      ++card.refused;
      refuse(card, at, bytes);
    }
    const int stream = current_stream(at);
    Block* block = cached(card, stream, size, large);
    if (block == nullptr) block = extend(card, at, stream, size, large);
    if (block == nullptr) {
      settle(card, at, true);
      empty(card, at);
      ++card.stats.num_alloc_retries;
      block = extend(card, at, stream, size, large);
    }
    if (block == nullptr) refuse(card, at, bytes);
    const size_t rest = block->size - size;
    if (card.expandable || !large ? rest >= kMinBlockSize : rest > kSmallSize)  // should_split
      card.pools[large].insert(cut(block, size));
    block->state = State::live, block->requested = bytes;
    change(card.stats.allocated_bytes, large, block->size);
    change(card.stats.active_bytes, large, block->size);
    change(card.stats.requested_bytes, large, bytes);
    change(card.stats.allocation, large, 1);
    return block;
  }

  [[noreturn]] static void refuse(Card& card, int at, size_t bytes) {
    ++card.stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated card out of memory. Tried to allocate ", bytes,
                     " bytes. Card ", at, " has a total capacity of ", card.total, " bytes of which ",
                     card.reserved(), " are reserved and ", card.stats.allocated_bytes[0].current, " allocated.");
  }

  static size_t growable(const Block* block) {
    const Block* after = block->after;
    return block->size + (after != nullptr && after->state == State::unmapped ? after->size : 0);
  }

  static Block* cached(Card& card, int stream, size_t size, bool large) {  // get_free_block
    Pool& pool = card.pools[large];
    Block key;
    key.stream = stream, key.size = size;
    auto found = pool.lower_bound(&key);
    if (found == pool.end() || (*found)->stream != stream) return nullptr;
    if (card.expandable)
      for (auto next = std::next(found);
           next != pool.end() && (*next)->stream == stream && growable(*next) < growable(*found); ++next)
        found = next;
    Block* block = *found;
    pool.erase(found);
    return block;
  }

  static bool reserve(Card& card, bool large, size_t size) {
    if (card.reserved() + size + card.outside > card.total) return false;
    change(card.stats.reserved_bytes, large, size);
    change(card.stats.segment, large, 1);
    ++card.stats.num_device_alloc;
    return true;
  }

  static Block* extend(Card& card, int at, int stream, size_t size, bool large) {  // alloc_block
    const size_t segment = !large ? kSmallBuffer : size < kMinLargeAlloc ? kLargeBuffer : up(size, kRoundLarge);
    if (card.fraction < 1 && card.reserved() + segment > card.fraction * card.total) return nullptr;
    if (card.expandable) return grow(card, at, stream, size, large);
    if (!reserve(card, large, segment)) return nullptr;
    auto hole = std::find_if(card.holes.begin(), card.holes.end(), [&](auto& each) { return each.second >= segment; });
    TORCH_CHECK(hole != card.holes.end(), "a simulated card has no addresses left");
    auto* block = new Block();
    block->card = at, block->stream = stream, block->large = large, block->at = hole->first, block->size = segment;
    if (const size_t left = hole->second - segment) card.holes[hole->first + segment] = left;
    card.holes.erase(hole);
    return block;
  }

  static size_t page(const Block* block) { return block->large ? kLargeBuffer : kSmallBuffer; }

  static void forget(Card& card, Block* block) {
    auto& free = card.unmapped[{block->stream, block->large}];
    free.erase(std::find(free.begin(), free.end(), block));
  }

  static void note_unmapped(Card& card, Block* block) {
    auto& free = card.unmapped[{block->stream, block->large}];
    free.insert(std::lower_bound(free.begin(), free.end(), block, [](Block* a, Block* b) { return a->at < b->at; }),
                block);
  }

  static Block* grow(Card& card, int at, int stream, size_t size, bool large) {  // try_allocate_expandable_block
    auto& free = card.unmapped[{stream, large}];
    if (free.empty()) {
      auto* whole = new Block();
      whole->card = at, whole->stream = stream, whole->large = large, whole->expandable = true;
      whole->state = State::unmapped;
      whole->at = card.next_expandable, whole->size = kSpan / 16 / kLargeBuffer * kLargeBuffer;
      card.next_expandable += whole->size;
      TORCH_CHECK(card.next_expandable <= kSpan, "a simulated card has no addresses left");
      free.push_back(whole);
    }
    Block* block = nullptr;
    for (Block* candidate : free) {  // find_expandable_block
      Block* first = candidate->before && candidate->before->state == State::cached ? candidate->before : candidate;
      size_t room = 0;
      for (Block* each = first; each && each->state != State::live && room < size; each = each->after) room += each->size;
      if (room >= size) {
        block = first;
        break;
      }
    }
    if (block == nullptr) return nullptr;
    if (block->state == State::unmapped && !(block = map(card, block, std::min(block->size, size)))) return nullptr;
    while (block->size < size) {
      Block* beyond = block->after;
      if (!(block = map(card, beyond, std::min(size - block->size, beyond->size)))) return nullptr;
    }
    card.pools[large].erase(block);
    return block;
  }

  static Block* map(Card& card, Block* block, size_t size) {  // map_block; returns what it has become
    const size_t mapped = up(size, page(block));
    if (!reserve(card, block->large, mapped)) return nullptr;
    forget(card, block);
    if (mapped < block->size) note_unmapped(card, cut(block, mapped));
    block->state = State::cached;
    merge(card, block);
    card.pools[block->large].insert(block);
    return block;
  }

  static void unmap(Card& card, Block* block) {  // unmap_block: the pages that lie wholly in it
    const size_t unit = page(block), first = up(block->at, unit), last = (block->at + block->size) / unit * unit;
    if (last <= first) return;
    card.pools[block->large].erase(block);
    if (first > block->at) {
      Block* head = block;
      block = cut(block, first - block->at);
      card.pools[block->large].insert(head);
    }
    if (last < block->at + block->size) card.pools[block->large].insert(cut(block, last - block->at));
    madvise(real_bytes(address_of(block)), block->size, MADV_DONTNEED);
    change(card.stats.reserved_bytes, block->large, -static_cast<int64_t>(block->size));
    block->state = State::unmapped;
    merge(card, block);
    note_unmapped(card, block);
  }

  static void empty(Card& card, int at) {  // release_cached_blocks
    drain_all(at);
    settle(card, at, true);
    for (Pool& pool : card.pools) {
      const std::vector<Block*> blocks(pool.begin(), pool.end());
      for (Block* block : blocks) {
        if (block->expandable) unmap(card, block);
        else if (block->before == nullptr && block->after == nullptr) release(card, block);
      }
    }
  }

  static void release(Card& card, Block* block) {  // release_block
    card.pools[block->large].erase(block);
    madvise(real_bytes(address_of(block)), block->size, MADV_DONTNEED);
    change(card.stats.reserved_bytes, block->large, -static_cast<int64_t>(block->size));
    change(card.stats.segment, block->large, -1);
    auto hole = card.holes.emplace(block->at, block->size).first;
    if (auto next = std::next(hole); next != card.holes.end() && hole->first + hole->second == next->first)
      hole->second += next->second, card.holes.erase(next);
    if (hole != card.holes.begin())
      if (auto last = std::prev(hole); last->first + last->second == hole->first)
        last->second += hole->second, card.holes.erase(hole);
    delete block;
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

}  // namespace

bool is_address(const void* pointer) {
  auto* byte = static_cast<const char*>(pointer);
  return byte >= addresses() && byte < addresses() + kSpan * kMostCards;
}

int card_of(const void* pointer) { return static_cast<int>((static_cast<const char*>(pointer) - addresses()) / kSpan); }

char* real_bytes(const void* pointer) {
  auto* byte = static_cast<char*>(const_cast<void*>(pointer));
  return is_address(pointer) ? backing() + (byte - addresses()) : byte;
}

// Pinned memory

namespace {

struct PinnedBlock {
  size_t size;
  bool live;
};

class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::DeviceType::CPU};
    size_t size = 1;
    while (size < bytes) size *= 2;
    char* start = nullptr;
    for (auto& [at, block] : blocks())
      if (!block.live && block.size == size && !is_awaited(at, size)) start = at;
    if (start == nullptr) {
      start = static_cast<char*>(std::aligned_alloc(4096, up(size, 4096)));
      TORCH_CHECK_WITH(OutOfMemoryError, start != nullptr, "pinned memory: out of memory");
      reserved() += size;
    }
    blocks()[start] = {size, true};
    in_use() += size;
    return {start, start, &give_back, c10::DeviceType::CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memmove(to, from, bytes); }

  static bool has(const void* pointer) {
    std::lock_guard<std::recursive_mutex> held(lock());
    auto* byte = static_cast<char*>(const_cast<void*>(pointer));
    auto after = blocks().upper_bound(byte);
    if (after == blocks().begin()) return false;
    auto& [start, block] = *std::prev(after);
    return block.live && byte < start + block.size;
  }

  static size_t& reserved() {
    static size_t bytes = 0;
    return bytes;
  }

  static size_t& in_use() {
    static size_t bytes = 0;
    return bytes;
  }

 private:
  static std::map<char*, PinnedBlock>& blocks() {
    static auto* all = new std::map<char*, PinnedBlock>();
    return *all;
  }

  static void give_back(void* pointer) {
    if (pointer == nullptr) return;
    std::lock_guard<std::recursive_mutex> held(lock());
    auto& block = blocks().at(static_cast<char*>(pointer));
    block.live = false;
    in_use() -= block.size;
  }
};

Pinned pinned;

}  // namespace

bool is_pinned(const void* pointer) { return Pinned::has(pointer); }
c10::Allocator* pinned_allocator() { return &pinned; }

}  // namespace card

// What card.py calls

extern "C" {

void card_configure(int count, uint64_t seed, bool late, bool poison) {
  std::lock_guard<std::recursive_mutex> held(card::lock());
  auto& settings = card::settings();
  settings.count = count, settings.late = late, settings.poison = poison;
  card::seed_order(seed);
}

void card_set_memory(int card, int64_t total, int64_t outside, double fraction, bool expandable) {
  std::lock_guard<std::recursive_mutex> held(card::lock());
  auto& own = card::cards[card];
  own.total = total, own.outside = outside, own.fraction = fraction, own.expandable = expandable;
}

void card_refuse(int card, int64_t after, int64_t times) {
  std::lock_guard<std::recursive_mutex> held(card::lock());
  auto& own = card::cards[card];
  own.refuse_at = after < 0 ? -1 : own.allocations + after, own.refuse_times = times;
}

int64_t card_allocations(int card) { return card::cards[card].allocations; }
int64_t card_refused(int card) { return card::cards[card].refused; }
int64_t card_pinned_reserved() { return card::Pinned::reserved(); }
int64_t card_pinned_in_use() { return card::Pinned::in_use(); }

int card_fraction(int card, double fraction) {
  std::lock_guard<std::recursive_mutex> held(card::lock());
  card::cards[card].fraction = fraction;
  return 0;
}
}
