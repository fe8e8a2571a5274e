// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/tuning.h"

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

namespace jax_layout {
namespace {

using Choices = std::map<std::string, lt::Algorithm>;

struct Tuning {
  std::mutex mutex;
  std::string path;
  int candidates = 1;
  Choices choices;
};
Tuning& TheTuning() {
  static auto& tuning = *new Tuning;
  return tuning;
}

// 64 bits are 16 digits.
std::string ToText(const lt::Algorithm& algorithm) {
  std::string text;
  char digits[17];
  for (uint64_t word : algorithm.data) {
    std::snprintf(digits, sizeof(digits), "%016llx",
                  static_cast<unsigned long long>(word));
    text += digits;
  }
  return text;
}

bool FromText(std::string_view text, lt::Algorithm* algorithm) {
  if (text.size() != 16 * std::size(algorithm->data)) return false;
  for (uint64_t& word : algorithm->data) {
    const char* end = text.data() + 16;
    const auto parsed = std::from_chars(text.data(), end, word, 16);
    if (parsed.ec != std::errc() || parsed.ptr != end) return false;
    text.remove_prefix(16);
  }
  return true;
}

// {"problem": "algorithm", ...}. Problems have no quotes or backslashes.
bool Parse(std::string_view text, Choices* choices) {
  const auto next = [&] {
    const size_t at = text.find_first_not_of(" \t\r\n");
    text.remove_prefix(at == text.npos ? text.size() : at);
    return text.empty() ? '\0' : text.front();
  };
  const auto take = [&](char c) {
    if (next() != c) return false;
    text.remove_prefix(1);
    return true;
  };
  const auto take_string = [&](std::string* to) {
    if (!take('"')) return false;
    const size_t end = text.find_first_of("\"\\");
    if (end == text.npos || text[end] != '"') return false;
    *to = text.substr(0, end);
    text.remove_prefix(end + 1);
    return true;
  };
  if (!take('{')) return false;
  bool more = next() != '}';
  while (more) {
    std::string problem, algorithm;
    if (!take_string(&problem) || !take(':') || !take_string(&algorithm) ||
        !FromText(algorithm, &(*choices)[problem])) {
      return false;
    }
    more = take(',');
  }
  return take('}') && next() == '\0';
}

// No file has no choices.
Status Read(const std::string& path, Choices* choices) {
  std::ifstream file(path);
  if (!file) return Status::Ok();
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!Parse(text, choices)) {
    return Status::Error("tune_gemms: " + path + " is not a file of choices.");
  }
  return Status::Ok();
}

// Whole or not at all, for whoever reads it.
Status Write(const std::string& path, const Choices& choices) {
  const std::string unfinished = path + "." + std::to_string(getpid());
  std::ofstream file(unfinished);
  const char* separator = "{\n";
  for (const auto& [problem, algorithm] : choices) {
    file << separator << "  \"" << problem << "\": \"" << ToText(algorithm)
         << '"';
    separator = ",\n";
  }
  file << (choices.empty() ? "{}\n" : "\n}\n");
  file.close();
  if (!file || std::rename(unfinished.c_str(), path.c_str()) != 0) {
    std::remove(unfinished.c_str());
    return Status::Error("tune_gemms: cannot write " + path + ".");
  }
  return Status::Ok();
}

}  // namespace

Status TuneGemms(const std::string& path, int candidates) {
  Choices choices;
  Status status;
  if (!path.empty()) status = Read(path, &choices);
  // What cannot be written is better known before it is timed.
  if (status.ok() && !path.empty() && candidates > 1) {
    status = Write(path, choices);
  }
  if (!status.ok()) return status;
  Tuning& tuning = TheTuning();
  std::lock_guard lock(tuning.mutex);
  tuning.path = path;
  tuning.candidates = candidates;
  tuning.choices = std::move(choices);
  return status;
}

bool GemmsTuned() {
  Tuning& tuning = TheTuning();
  std::lock_guard lock(tuning.mutex);
  return tuning.candidates > 1 || !tuning.choices.empty();
}

int GemmCandidates() {
  Tuning& tuning = TheTuning();
  std::lock_guard lock(tuning.mutex);
  return tuning.candidates;
}

bool FindGemmChoice(const std::string& problem, lt::Algorithm* algorithm) {
  Tuning& tuning = TheTuning();
  std::lock_guard lock(tuning.mutex);
  const auto found = tuning.choices.find(problem);
  if (found == tuning.choices.end()) return false;
  *algorithm = found->second;
  return true;
}

Status KeepGemmChoice(const std::string& problem,
                      const lt::Algorithm& algorithm) {
  Tuning& tuning = TheTuning();
  std::lock_guard lock(tuning.mutex);
  Choices choices;
  if (!tuning.path.empty()) {
    Status status = Read(tuning.path, &choices);
    if (!status.ok()) return status;
  }
  tuning.choices[problem] = algorithm;
  for (const auto& [known, choice] : tuning.choices) choices[known] = choice;
  tuning.choices = std::move(choices);
  return tuning.path.empty() ? Status::Ok()
                             : Write(tuning.path, tuning.choices);
}

}  // namespace jax_layout
