// The streams of simulated cards: asynchronous copies that really happen late, and the events that order them.
//
// Kernels run at once. What waits are copies: until their stream is synchronised or an event behind them is, until a
// kernel of the same stream uses their bytes, or until the seed lets them go ahead. A kernel of another stream that
// waited for no event reads what is there.

#include "card.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>

namespace card {
namespace {

struct Waiting {
  char* to = nullptr;  // a copy; else a wait for another stream
  const char* from = nullptr;
  size_t bytes = 0;
  int card = 0, stream = 0;
  uint64_t place = 0;
};

struct Stream {
  std::deque<Waiting> queue;
  uint64_t enqueued = 0, done = 0;
};

Stream streams[kMostCards][kStreams];
int handed_out[kMostCards] = {};
thread_local int the_card = 0;
thread_local int the_stream[kMostCards] = {};
std::mt19937_64 order(0);

bool overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

bool uses(const Waiting& waiting, const Range& range) {
  return overlap(waiting.to, waiting.bytes, range.first, range.second) ||
         overlap(waiting.from, waiting.bytes, range.first, range.second);
}

void do_first(Stream& stream) {
  Waiting first = stream.queue.front();
  if (first.to == nullptr) drain(first.card, first.stream, first.place);
  else std::memcpy(first.to, first.from, first.bytes);
  stream.queue.pop_front();
  ++stream.done;
}

void enqueue(int card, int stream, Waiting waiting) {
  Stream& own = streams[card][stream];
  own.queue.push_back(waiting);
  ++own.enqueued;
  if (!settings().late) drain(card, stream, own.enqueued);
}

}  // namespace

std::recursive_mutex& lock() {
  static std::recursive_mutex only;
  return only;
}

Settings& settings() {
  static Settings only;
  return only;
}

void seed_order(uint64_t seed) {
  std::lock_guard<std::recursive_mutex> held(lock());
  settings().seed = seed;
  order.seed(seed);
}

int current_card() { return the_card; }
void set_card(int card) { the_card = card; }
int current_stream(int card) { return the_stream[card]; }
void set_stream(int card, int stream) { the_stream[card] = stream; }

int next_stream(int card) {
  std::lock_guard<std::recursive_mutex> held(lock());
  return 1 + handed_out[card]++ % (kStreams - 1);
}

uint64_t enqueued(int card, int stream) {
  std::lock_guard<std::recursive_mutex> held(lock());
  return streams[card][stream].enqueued;
}

bool has_reached(int card, int stream, uint64_t place) {
  std::lock_guard<std::recursive_mutex> held(lock());
  return streams[card][stream].done >= place;
}

void copy_later(int card, int stream, char* to, const char* from, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock());
  Waiting waiting;
  waiting.to = to, waiting.from = from, waiting.bytes = bytes;
  enqueue(card, stream, waiting);
  progress();
}

void wait_later(int card, int stream, int other_card, int other, uint64_t place) {
  std::lock_guard<std::recursive_mutex> held(lock());
  Waiting waiting;
  waiting.card = other_card, waiting.stream = other, waiting.place = place;
  enqueue(card, stream, waiting);
}

void touch(int card, int stream, const std::vector<Range>& ranges) {
  std::lock_guard<std::recursive_mutex> held(lock());
  progress();
  Stream& own = streams[card][stream];
  uint64_t until = 0, place = own.done;
  for (const Waiting& waiting : own.queue) {
    ++place;
    bool counts = waiting.to == nullptr;
    for (const Range& range : ranges) counts = counts || uses(waiting, range);
    if (counts) until = place;
  }
  drain(card, stream, until);
}

void drain(int card, int stream, uint64_t until) {
  std::lock_guard<std::recursive_mutex> held(lock());
  Stream& own = streams[card][stream];
  while (own.done < until && !own.queue.empty()) do_first(own);
}

void drain_all(int card) {
  for (int stream = 0; stream < kStreams; ++stream) drain(card, stream, enqueued(card, stream));
}

bool is_awaited(const char* start, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock());
  for (auto& of_card : streams)
    for (Stream& stream : of_card)
      for (const Waiting& waiting : stream.queue)
        if (waiting.to != nullptr && uses(waiting, {start, bytes})) return true;
  return false;
}

void progress() {
  if (!settings().late) return;
  std::lock_guard<std::recursive_mutex> held(lock());
  if (order() % 3 != 0) return;
  std::vector<Stream*> ready;
  for (auto& of_card : streams)
    for (Stream& stream : of_card) {
      if (stream.queue.empty()) continue;
      const Waiting& front = stream.queue.front();
      if (front.to != nullptr || has_reached(front.card, front.stream, front.place)) ready.push_back(&stream);
    }
  if (!ready.empty()) do_first(*ready[order() % ready.size()]);
}

namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  int card = 0, stream = 0;
  uint64_t place = 0;
  Clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(the_card)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < settings().count, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) set_card(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().count);
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(device, current_stream(at(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return stream_of(device, next_stream(at(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    set_stream(stream.device_index(), static_cast<int>(stream.id()));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &streams[stream.device_index()][stream.id()];
  }
  bool queryStream(const c10::Stream& stream) const override {
    progress();
    return has_reached(stream.device_index(), stream.id(), enqueued(stream.device_index(), stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    drain(stream.device_index(), stream.id(), enqueued(stream.device_index(), stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex card) const override { drain_all(card); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto*& own = reinterpret_cast<Event*&>(*event);
    if (own == nullptr) own = new Event();
    own->card = stream.device_index(), own->stream = stream.id();
    own->place = enqueued(own->card, own->stream), own->at = Clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto* own = static_cast<Event*>(event);
    wait_later(stream.device_index(), stream.id(), own->card, own->stream, own->place);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    progress();
    auto* own = static_cast<Event*>(event);
    return has_reached(own->card, own->stream, own->place);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto* own = static_cast<Event*>(event);
    drain(own->card, own->stream, own->place);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto took = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(took).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    c10::getDeviceAllocator(kType)->recordStream(data, stream);
  }

 private:
  static int at(c10::Device device) { return device.has_index() ? device.index() : the_card; }
  static c10::Stream stream_of(c10::Device device, int stream) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(at(device))), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace card
