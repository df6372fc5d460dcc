// A plain driver for target.cpp where there is no libFuzzer: it takes the options of libFuzzer that
// run.py gives, runs the corpus, then random changes of it. It learns nothing of coverage.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

using Bytes = std::vector<uint8_t>;
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)());

namespace {

Bytes current;  // what a finding is written from
std::string artifacts;

void keep_finding() {
  std::ofstream(artifacts + "crash", std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()), std::streamsize(current.size()));
  std::fprintf(stderr, "input written to %scrash\n", artifacts.c_str());
}

void run(const Bytes& input) {
  current = input;
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

void mutate(Bytes& bytes, const Bytes& other, std::mt19937_64& random) {
  constexpr uint8_t kEdges[] = {0, 1, 0x7f, 0x80, 0xfe, 0xff};
  const auto below = [&](size_t n) { return size_t(random() % n); };
  for (size_t times = 1 + below(8); times != 0; --times) {
    if (bytes.empty()) bytes.push_back(0);
    const size_t at = below(bytes.size());
    switch (below(6)) {
      case 0: bytes[at] ^= uint8_t(1u << below(8)); break;
      case 1: bytes[at] = uint8_t(random()); break;
      case 2: bytes[at] = kEdges[below(sizeof(kEdges))]; break;
      case 3: bytes.resize(1 + below(2048)); break;
      case 4:
        for (size_t i = at; i < bytes.size() && i < at + 16; ++i) bytes[i] = uint8_t(random());
        break;
      default:
        for (size_t i = at; i < bytes.size() && i < other.size(); ++i) bytes[i] = other[i];
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 10;
  std::vector<Bytes> corpus{Bytes(64, 0)};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("-max_total_time=")) {
      seconds = std::stod(argument.substr(16));
    } else if (argument.starts_with("-artifact_prefix=")) {
      artifacts = argument.substr(17);
    } else if (!argument.starts_with("-")) {
      for (const auto& entry : std::filesystem::directory_iterator(argument)) {
        std::ifstream file(entry.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      }
    }
  }
  __sanitizer_set_death_callback(keep_finding);
  for (const Bytes& input : corpus) run(input);
  std::mt19937_64 random(1);
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  uint64_t runs = corpus.size();
  for (; elapsed() < seconds; ++runs) {
    Bytes input = corpus[random() % corpus.size()];
    mutate(input, corpus[random() % corpus.size()], random);
    run(input);
  }
  std::printf("stat::number_of_executed_units: %llu\n", static_cast<unsigned long long>(runs));
}
