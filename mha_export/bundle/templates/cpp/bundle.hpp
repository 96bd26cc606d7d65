// What a C++ app needs to use a bundle: manifest, hashes, known answers, and which variant to load.
// One header, C++17, no dependency.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace bundle {

// Something is not as it should be; what() names it.
struct CheckError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- JSON, as much of it as a manifest uses ------------------------------------------------------

struct Json {
  enum Kind { Null, Bool, Number, Text, List, Object } kind = Null;
  double number = 0;
  std::string text;
  std::vector<Json> list;
  std::vector<std::pair<std::string, Json>> object;

  bool null() const { return kind == Null; }
  const Json& at(const std::string& name) const {
    for (const auto& item : object)
      if (item.first == name) return item.second;
    static const Json none;
    return none;
  }
  const Json& operator[](const std::string& name) const {
    const Json& found = at(name);
    if (kind != Object) throw CheckError("manifest.json: damaged (no " + name + ")");
    return found;
  }
  int64_t integer() const { return static_cast<int64_t>(number); }
};

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}
  Json parse() {
    Json value = read();
    skip();
    if (at_ != text_.size()) fail("text after the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw CheckError("manifest.json: damaged (" + why + " at byte " + std::to_string(at_) + ")");
  }
  void skip() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_])) ++at_;
  }
  char peek() {
    skip();
    if (at_ >= text_.size()) fail("cut short");
    return text_[at_];
  }
  void expect(char c) {
    if (peek() != c) fail(std::string("expected ") + c);
    ++at_;
  }
  Json word(const char* name, Json value) {
    if (text_.compare(at_, std::strlen(name), name) != 0) fail("unknown word");
    at_ += std::strlen(name);
    return value;
  }
  Json read() {
    Json value;
    switch (peek()) {
      case '{': {
        value.kind = Json::Object;
        for (++at_; peek() != '}';) {
          if (!value.object.empty()) expect(',');
          std::string name = string();
          expect(':');
          value.object.emplace_back(std::move(name), read());
        }
        ++at_;
        return value;
      }
      case '[': {
        value.kind = Json::List;
        for (++at_; peek() != ']';) {
          if (!value.list.empty()) expect(',');
          value.list.push_back(read());
        }
        ++at_;
        return value;
      }
      case '"':
        value.kind = Json::Text;
        value.text = string();
        return value;
      case 'n': return word("null", value);
      case 't': value.kind = Json::Bool; value.number = 1; return word("true", value);
      case 'f': value.kind = Json::Bool; return word("false", value);
    }
    size_t length = 0;
    value.kind = Json::Number;
    try {
      value.number = std::stod(text_.substr(at_, 40), &length);
    } catch (const std::exception&) {
      fail("not a number");
    }
    at_ += length;
    return value;
  }
  std::string string() {
    expect('"');
    std::string found;
    while (at_ < text_.size() && text_[at_] != '"') {
      char c = text_[at_++];
      if (c != '\\') {
        found += c;
        continue;
      }
      if (at_ >= text_.size()) break;
      c = text_[at_++];
      if (c == 'u') fail("an escape that manifests do not use");
      const char* known = std::strchr("n\nt\tr\rb\bf\f", c);
      found += known ? known[1] : c;
    }
    if (at_ >= text_.size()) fail("cut short");
    ++at_;
    return found;
  }
  const std::string& text_;
  size_t at_ = 0;
};

// ---- SHA-256 (FIPS 180-4) ------------------------------------------------------------------------

class Sha256 {
 public:
  void add(const char* data, size_t size) {
    length_ += size;
    for (size_t i = 0; i < size; ++i) {
      block_[filled_++] = static_cast<uint8_t>(data[i]);
      if (filled_ == 64) turn();
    }
  }
  std::string hex() {
    const uint64_t bits = length_ * 8;
    const char one = static_cast<char>(0x80), zero = 0;
    add(&one, 1);
    while (filled_ != 56) add(&zero, 1);
    for (int i = 7; i >= 0; --i) {
      const char byte = static_cast<char>(bits >> (8 * i));
      add(&byte, 1);
    }
    std::string found;
    for (uint32_t word : state_)
      for (int i = 28; i >= 0; i -= 4) found += "0123456789abcdef"[(word >> i) & 15];
    return found;
  }

 private:
  static uint32_t right(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }
  static const std::array<uint32_t, 64>& constants() {
    static const std::array<uint32_t, 64> made = [] {
      std::array<uint32_t, 64> k{};
      for (uint32_t n = 2, found = 0; found < 64; ++n) {
        bool prime = true;
        for (uint32_t d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
        if (!prime) continue;
        const long double root = std::cbrt(static_cast<long double>(n));
        k[found++] = static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
      }
      return k;
    }();
    return made;
  }
  void turn() {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = uint32_t(block_[4 * i]) << 24 | uint32_t(block_[4 * i + 1]) << 16 |
             uint32_t(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (right(a, 7) ^ right(a, 18) ^ (a >> 3)) + w[i - 7] +
             (right(b, 17) ^ right(b, 19) ^ (b >> 10));
    }
    auto s = state_;
    for (int i = 0; i < 64; ++i) {
      const uint32_t t1 = s[7] + (right(s[4], 6) ^ right(s[4], 11) ^ right(s[4], 25)) +
                          ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants()[i] + w[i];
      const uint32_t t2 = (right(s[0], 2) ^ right(s[0], 13) ^ right(s[0], 22)) +
                          ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {t1 + t2, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
    }
    for (int i = 0; i < 8; ++i) state_[i] += s[i];
    filled_ = 0;
  }
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[64];
  size_t filled_ = 0;
  uint64_t length_ = 0;
};

// ---- the bundle ----------------------------------------------------------------------------------

inline std::string read_file(const std::string& folder, const std::string& name) {
  std::ifstream file(folder + "/" + name, std::ios::binary);
  if (!file) throw CheckError(name + ": missing");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline std::string sha256(const std::string& data) {
  Sha256 digest;
  digest.add(data.data(), data.size());
  return digest.hex();
}

// manifest.json, its own hash checked: of its bytes with the 64 digits set to zero.
inline Json read_manifest(const std::string& folder) {
  std::string text = read_file(folder, "manifest.json");
  Json manifest = Parser(text).parse();
  const std::string stated = manifest["sha256"].text;
  const size_t where = stated.size() == 64 ? text.find(stated) : std::string::npos;
  if (where != std::string::npos) text.replace(where, 64, std::string(64, '0'));
  if (where == std::string::npos || sha256(text) != stated)
    throw CheckError("manifest.json: changed (its sha256 is not the one it states)");
  return manifest;
}

// Every file is there and unchanged.
inline void check_files(const std::string& folder, const Json& manifest) {
  for (const auto& [name, stated] : manifest["files"].object) {
    std::ifstream file(folder + "/" + name, std::ios::binary);
    if (!file) throw CheckError(name + ": missing");
    Sha256 digest;
    std::vector<char> block(1 << 20);
    while (file.read(block.data(), block.size()) || file.gcount())
      digest.add(block.data(), static_cast<size_t>(file.gcount()));
    const std::string found = digest.hex();
    if (found != stated["sha256"].text) throw CheckError(name + ": changed (sha256 " + found + ")");
  }
}

// "1.30.0-dev" is {1, 30, 0}.
inline std::vector<int> numbers(const std::string& version) {
  std::vector<int> found;
  std::istringstream parts(version);
  for (std::string part; std::getline(parts, part, '.');) {
    const size_t digits = std::min(part.find_first_not_of("0123456789"), part.size());
    if (digits) found.push_back(std::stoi(part.substr(0, digits)));
    if (digits != part.size()) break;
  }
  return found;
}

struct Choice {
  const Json* variant;
  std::string provider;
};

// The first variant, in the manifest's order, that `runtime` can run; and the provider. `want` leaves
// only that variant. The error says what came closest: a version too old, before a provider that is
// not there, before a runtime no variant is for.
inline Choice choose(const Json& manifest, const std::string& runtime, const std::string& version,
                     const std::vector<std::string>& providers, const std::string& want = "") {
  int closest = 3;
  std::string reason = "unknown: the bundle holds no variant " + want;
  for (const Json& variant : manifest["variants"].list) {
    const std::string name = variant["target"].text;
    if (!want.empty() && want != name) continue;
    const Json *own = nullptr, *here = nullptr;
    for (const Json& place : variant["runs_on"].list) {
      if (place["runtime"].text != runtime) continue;
      if (!own) own = &place;
      const std::string provider = place["provider"].text;
      if (std::find(providers.begin(), providers.end(), provider) == providers.end()) continue;
      if (!here) here = &place;
      if (!(numbers(version) < numbers(place["minimum"].text))) return {&variant, provider};
    }
    const int rank = here ? 0 : own ? 1 : 2;
    if (rank >= closest) continue;
    closest = rank;
    if (here)
      reason = "older: " + name + " needs " + runtime + " " + (*here)["minimum"].text +
               "; this is " + version;
    else if (own)
      reason = "provider: " + name + " needs " + (*own)["provider"].text + ", which is not here";
    else
      reason = "runtime: " + name + " is not for " + runtime;
  }
  throw CheckError(reason);
}

inline std::vector<int64_t> shape_of(const Json& tensor) {
  std::vector<int64_t> found;
  for (const Json& size : tensor["shape"].list) found.push_back(size.integer());
  return found;
}

inline double half_to_double(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, part = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(part, -24);
  if (exponent == 31) return part ? std::nan("") : sign * INFINITY;
  return sign * std::ldexp(1024 + part, exponent - 25);
}

// Element i of an array of `dtype`, as numpy calls it.
inline double element(const void* data, const std::string& dtype, size_t i) {
  const auto as = [&](auto kind) {
    decltype(kind) value;
    std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(value), sizeof(value));
    return value;
  };
  if (dtype == "float32") return as(float{});
  if (dtype == "float64") return as(double{});
  if (dtype == "int64") return static_cast<double>(as(int64_t{}));
  if (dtype == "int32") return as(int32_t{});
  if (dtype == "bool" || dtype == "uint8") return as(uint8_t{});
  if (dtype == "float16") return half_to_double(as(uint16_t{}));
  if (dtype == "bfloat16") {
    const uint32_t bits = uint32_t(as(uint16_t{})) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  throw CheckError("element type " + dtype + " is not handled");
}

struct Output {
  const void* data;
  std::string dtype;
  std::vector<int64_t> shape;
};

// The largest error, in units of its row's bound. Over 1 is imprecise; too far is an error.
inline double check_answer(const std::string& bytes, const Json& known,
                           const std::map<std::string, Output>& outputs) {
  double worst = 0;
  for (const Json& t : known["outputs"].list) {
    const std::string name = t["name"].text;
    const auto found = outputs.find(name);
    if (found == outputs.end() || found->second.shape != shape_of(t))
      throw CheckError("answer '" + known["name"].text + "': " + name + " has another shape");
    size_t count = 1;
    for (int64_t size : shape_of(t)) count *= static_cast<size_t>(size);
    const size_t rows = static_cast<size_t>(t["rows"].integer());
    for (size_t i = 0; i < count; ++i) {
      const size_t row = i / (count / rows);
      const double a = element(found->second.data, found->second.dtype, i);
      const double b = element(bytes.data() + t["offset"].integer(), t["dtype"].text, i);
      const double bound = element(bytes.data() + t["bound"].integer(), "float32", row);
      const double coarse = element(bytes.data() + t["coarse"].integer(), "float32", row);
      const double error = a == b || (std::isnan(a) && std::isnan(b)) ? 0 : std::fabs(a - b);
      if (!(error <= coarse)) {
        std::ostringstream words;
        words << "answer '" << known["name"].text << "': " << name << " is off by " << error
              << ", bound " << bound;
        throw CheckError(words.str());
      }
      worst = std::max(worst, error / bound);
    }
  }
  return worst;
}

}  // namespace bundle
