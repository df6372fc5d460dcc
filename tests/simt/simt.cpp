#include "simt.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

namespace simt {
namespace {

constexpr std::size_t kStack = 256 * 1024, kFence = 256;
constexpr unsigned char kFenceByte = 0xc3, kPoison = 0xff;  // as floats, the poison is NaN
constexpr unsigned kWarp = 32;

struct Lane {
  enum State { kReady, kWaiting, kDone } state = kReady;
  ucontext_t context;
  Here here;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  Call call;
  unsigned mask;
  uint64_t value, result;
  int source, line;
};

struct Machine {
  std::vector<Lane> lanes;
  std::vector<char> stacks;
  std::vector<unsigned char> shared;
  unsigned char* shared_begin = nullptr;
  const std::function<void()>* body = nullptr;
  ucontext_t home;
  void* home_fake_stack = nullptr;
  const void* home_stack = nullptr;
  std::size_t home_stack_bytes = 0;
  Lane* current = nullptr;
};
Machine machine;

// Leaves `from_fake` (null: for good) for another stack.
void leave([[maybe_unused]] void** from_fake, [[maybe_unused]] const void* stack,
           [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(from_fake, stack, bytes);
#endif
}
void arrive([[maybe_unused]] void* fake, [[maybe_unused]] const void** from,
            [[maybe_unused]] std::size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, from, bytes);
#endif
}

void lane_main() {
  Machine& m = machine;
  arrive(nullptr, &m.home_stack, &m.home_stack_bytes);
  (*m.body)();
  Lane* lane = m.current;
  lane->state = Lane::kDone;
  leave(nullptr, m.home_stack, m.home_stack_bytes);
  swapcontext(&lane->context, &m.home);
}

void resume(Lane& lane) {
  Machine& m = machine;
  m.current = &lane;
  leave(&m.home_fake_stack, lane.stack, kStack);
  swapcontext(&m.home, &lane.context);
  arrive(m.home_fake_stack, nullptr, nullptr);
  m.current = nullptr;
}

const char* name(Call call) {
  return call == Call::kSyncThreads ? "__syncthreads"
         : call == Call::kSyncWarp  ? "__syncwarp"
         : call == Call::kBallot    ? "__ballot_sync"
                                    : "__shfl_sync";
}
std::string at(const Lane& lane) {
  return std::string(name(lane.call)) + " in line " + std::to_string(lane.line);
}
std::string who(const Lane& lane) {
  return "thread " + std::to_string(lane.here.thread.x) + " of block " +
         std::to_string(lane.here.block.x);
}

// Lets this lane's collective happen when all have come; says what keeps it from it for ever.
std::string complete_warp(Lane& lane) {
  const unsigned warp = lane.here.thread.x / kWarp * kWarp;
  const auto& lanes = machine.lanes;
  if (!(lane.mask >> (lane.here.thread.x - warp) & 1u))
    return who(lane) + " is not in its own mask: " + at(lane);
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!(lane.mask >> l & 1u)) continue;
    if (warp + l >= lanes.size()) return "mask names a lane that there is not: " + at(lane);
    const Lane& other = lanes[warp + l];
    if (other.state == Lane::kDone) return who(other) + " has exited, others wait for it: " + at(lane);
    if (other.call != lane.call || other.line != lane.line || other.mask != lane.mask)
      return who(other) + " came to " + at(other) + " where " + who(lane) + " came to " + at(lane) +
             (other.mask != lane.mask ? " (the masks differ)" : "");
  }
  std::string fault;
  uint64_t ballot = 0;
  for (unsigned l = 0; l < kWarp; ++l)
    if (lane.mask >> l & 1u) ballot |= uint64_t(machine.lanes[warp + l].value != 0) << l;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!(lane.mask >> l & 1u)) continue;
    Lane& other = machine.lanes[warp + l];
    if (other.source < 0 || other.source >= int(kWarp) || !(lane.mask >> other.source & 1u))
      fault = who(other) + " reads a lane that is not in the mask: " + at(other);
    else other.result = lane.call == Call::kBallot ? ballot : machine.lanes[warp + other.source].value;
  }
  for (unsigned l = 0; l < kWarp; ++l)
    if (lane.mask >> l & 1u) machine.lanes[warp + l].state = Lane::kReady;
  return fault;
}

// All lanes wait or are done. Lets go on who can, and says what is wrong when nobody or not all
// ever can.
std::string complete() {
  bool all_at_barrier = true, any = false;
  for (Lane& lane : machine.lanes) {
    if (lane.state == Lane::kWaiting && lane.call != Call::kSyncThreads) {
      all_at_barrier = false;
      const std::string fault = complete_warp(lane);
      if (!fault.empty()) return fault;
    }
    any = any || lane.state != Lane::kDone;
  }
  if (!any || !all_at_barrier) return "";
  const Lane* first = nullptr;
  for (const Lane& lane : machine.lanes)
    if (lane.state == Lane::kWaiting && first == nullptr) first = &lane;
  for (const Lane& lane : machine.lanes) {
    if (lane.state == Lane::kDone) return who(lane) + " has exited, others wait for it: " + at(*first);
    if (lane.line != first->line)
      return who(lane) + " came to " + at(lane) + " where " + who(*first) + " came to " + at(*first);
  }
  for (Lane& lane : machine.lanes) lane.state = Lane::kReady;
  return "";
}

void start(Lane& lane, const Grid& grid, unsigned block, unsigned thread) {
  lane.here = Here{{thread}, {block}, {grid.threads}, {grid.blocks}};
  lane.stack = machine.stacks.data() + kStack * thread;
  lane.fake_stack = nullptr;
  lane.state = Lane::kReady;
  getcontext(&lane.context);
  lane.context.uc_stack.ss_sp = lane.stack;
  lane.context.uc_stack.ss_size = kStack;
  lane.context.uc_link = nullptr;
  makecontext(&lane.context, lane_main, 0);
}

std::string run_block(const Grid& grid, unsigned block, std::mt19937_64& random) {
  Machine& m = machine;
  for (unsigned i = 0; i < grid.threads; ++i) start(m.lanes[i], grid, block, i);
  std::fill(m.shared_begin, m.shared_begin + grid.shared_bytes, kPoison);
  std::vector<unsigned> order(grid.threads);
  for (unsigned i = 0; i < grid.threads; ++i)
    order[i] = grid.order == Order::kBackwards ? grid.threads - 1 - i : i;
  for (;;) {
    if (grid.order == Order::kRandom) std::shuffle(order.begin(), order.end(), random);
    bool ran = false;
    for (const unsigned i : order) {
      if (m.lanes[i].state != Lane::kReady) continue;
      resume(m.lanes[i]);
      ran = true;
    }
    if (!ran) break;
    const std::string fault = complete();
    if (!fault.empty()) return fault;
  }
  ASAN_UNPOISON_MEMORY_REGION(m.shared.data(), m.shared.size());
  const auto is_fence = [](unsigned char b) { return b == kFenceByte; };
  const unsigned char* end = m.shared_begin + grid.shared_bytes;
  if (!std::all_of(m.shared_begin - kFence, m.shared_begin, is_fence) ||
      !std::all_of(end, end + kFence, is_fence))
    return "block " + std::to_string(block) + " wrote outside its shared memory";
  return "";
}

}  // namespace

const Here& here() { return machine.current->here; }
void* shared_memory() { return machine.shared_begin; }

uint64_t meet(Call call, unsigned mask, uint64_t value, int source, int line) {
  Machine& m = machine;
  Lane& lane = *m.current;
  lane.call = call;
  lane.mask = mask;
  lane.value = value;
  lane.source = source;
  lane.line = line;
  lane.state = Lane::kWaiting;
  leave(&lane.fake_stack, m.home_stack, m.home_stack_bytes);
  swapcontext(&lane.context, &m.home);
  arrive(lane.fake_stack, nullptr, nullptr);
  return lane.result;
}

std::string run(const Grid& grid, const std::function<void()>& body) {
  Machine& m = machine;
  std::mt19937_64 random(grid.seed);
  m.body = &body;
  m.lanes.resize(grid.threads);
  m.stacks.resize(std::max(m.stacks.size(), kStack * grid.threads));
  std::string fault;
  for (unsigned block = 0; block < grid.blocks && fault.empty(); ++block) {
    // A vector begins at a multiple of 16 bytes; the fence keeps to it.
    m.shared.assign(grid.shared_bytes + 2 * kFence, kFenceByte);
    m.shared_begin = m.shared.data() + kFence;
    ASAN_POISON_MEMORY_REGION(m.shared.data(), kFence);
    ASAN_POISON_MEMORY_REGION(m.shared_begin + grid.shared_bytes, kFence);
    fault = run_block(grid, block, random);
    ASAN_UNPOISON_MEMORY_REGION(m.shared.data(), m.shared.size());
  }
  return fault;
}

}  // namespace simt
