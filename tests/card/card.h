// Simulated cards: their memory, their streams, and what the kernels need of both. `card.py` says what they are for.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace card {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMostCards = 4;
constexpr int kStreams = 33;  // of a card: the default one, and those that it hands out in turn

// One lock for all that is simulated; never held while a kernel runs.
std::recursive_mutex& lock();

// Memory. A tensor's address cannot be read: its bytes lie `real_bytes` away, where only kernels look.
bool is_address(const void* pointer);
int card_of(const void* pointer);
char* real_bytes(const void* pointer);  // of an address of a card, or the pointer itself where it is the host's
bool is_pinned(const void* pointer);

// Streams. Copies that may be asynchronous wait in their stream until something orders them.
using Range = std::pair<const char*, size_t>;  // real bytes
int current_card();
void set_card(int card);
int current_stream(int card);
void set_stream(int card, int stream);
int next_stream(int card);
uint64_t enqueued(int card, int stream);
bool has_reached(int card, int stream, uint64_t place);
void copy_later(int card, int stream, char* to, const char* from, size_t bytes);
void wait_later(int card, int stream, int other_card, int other, uint64_t place);
void touch(int card, int stream, const std::vector<Range>& ranges);  // a kernel is about to use these
void drain(int card, int stream, uint64_t until);
void drain_all(int card);
bool is_awaited(const char* start, size_t bytes);  // by a copy that has not happened
void progress();  // some of what waits may happen now, as the seed has it

struct Settings {
  int count = 2;
  uint64_t seed = 0;
  bool late = true;    // copies wait; false: they happen at once
  bool poison = true;  // new memory holds 0xFF: not a number as a float
};
Settings& settings();
void seed_order(uint64_t seed);

}  // namespace card
