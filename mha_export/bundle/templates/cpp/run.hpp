// What both programs beside this share: known answers, and a decoder's tokens.
//
// A Session has: std::map<std::string, bundle::Output> run(const std::vector<Feed>&).

#pragma once

#include <chrono>
#include <cstdio>

#include "bundle.hpp"

namespace bundle {

struct Feed {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

inline std::vector<Feed> inputs_of(const std::string& bytes, const Json& known) {
  std::vector<Feed> feeds;
  for (const Json& t : known["inputs"].list)
    feeds.push_back({t["name"].text, t["dtype"].text, shape_of(t),
                     bytes.substr(t["offset"].integer(), t["bytes"].integer())});
  return feeds;
}

inline size_t width_of(const std::string& dtype) {
  if (dtype == "int64" || dtype == "float64") return 8;
  if (dtype == "float16" || dtype == "bfloat16") return 2;
  return dtype == "bool" || dtype == "uint8" ? 1 : 4;
}

inline Feed integers(const Json& value, const std::vector<int64_t>& numbers,
                     const std::vector<int64_t>& shape) {
  Feed feed{value["name"].text, value["dtype"].text, shape, ""};
  for (int64_t number : numbers) {  // little-endian: the first bytes of a wider integer
    feed.bytes.append(reinterpret_cast<const char*>(&number), width_of(feed.dtype));
  }
  return feed;
}

// Greedy tokens after `prompt`; `say` gets each as it comes. Keys and values stay in the cache.
template <class Session, class Say>
std::vector<int64_t> generate(Session& session, const Json& manifest, std::vector<int64_t> fresh,
                              size_t count, Say say) {
  const Json& cache = manifest["cache"];
  const bool is_static = cache["growth"].text == "static";
  const int64_t longest = static_cast<int64_t>(fresh.size() + count);
  int64_t room = is_static ? longest : 0;  // of a static cache
  std::map<std::string, const Json*> values;
  for (const Json& value : manifest["inputs"].list) values[value["name"].text] = &value;
  std::map<std::string, Feed> past;
  for (const Json& t : cache["tensors"].list) {
    const Json& value = *values.at(t["past"].text);
    Feed feed{t["past"].text, value["dtype"].text, {}, ""};
    for (const Json& size : value["shape"].list)
      feed.shape.push_back(size.kind == Json::Number ? size.integer() : 1);
    const size_t axis = static_cast<size_t>(t["axis"].integer());
    if (is_static && value["shape"].list[axis].kind == Json::Number) room = feed.shape[axis];
    feed.shape[axis] = room;
    size_t elements = 1;
    for (int64_t size : feed.shape) elements *= static_cast<size_t>(size);
    feed.bytes.assign(elements * width_of(feed.dtype), '\0');
    past[feed.name] = feed;
  }
  if (is_static && room < longest)
    throw CheckError("the cache has room for " + std::to_string(room) +
                     " tokens, prompt included, not " + std::to_string(longest));
  std::vector<int64_t> tokens;
  int64_t done = 0;
  while (tokens.size() < count) {
    const int64_t length = static_cast<int64_t>(fresh.size()), total = done + length;
    const int64_t width = is_static ? room : total;
    std::vector<Feed> feeds;
    for (const auto& item : past) feeds.push_back(item.second);
    std::vector<int64_t> positions, mask, totals{total};
    for (int64_t i = done; i < total; ++i) positions.push_back(i);
    for (int64_t i = 0; i < width; ++i) mask.push_back(i < total);
    const auto give = [&](const Json& name, const std::vector<int64_t>& numbers,
                          const std::vector<int64_t>& shape) {
      if (!name.null()) feeds.push_back(integers(*values.at(name.text), numbers, shape));
    };
    give(cache["tokens"].list[0], fresh, {1, length});
    give(cache["positions"], positions, {1, length});
    give(cache["mask"], mask, {1, width});
    give(cache["total_length"], totals, {1});
    const auto outputs = session.run(feeds);
    const Output& logits = outputs.at(cache["logits"].text);
    size_t elements = 1;
    for (int64_t size : logits.shape) elements *= static_cast<size_t>(size);
    const size_t start = elements - static_cast<size_t>(logits.shape.back());
    size_t best = start;
    for (size_t i = start; i < elements; ++i)
      if (element(logits.data, logits.dtype, i) > element(logits.data, logits.dtype, best)) best = i;
    for (const Json& t : cache["tensors"].list) {
      const Output& present = outputs.at(t["present"].text);
      Feed& feed = past[t["past"].text];
      size_t size = width_of(feed.dtype);
      for (int64_t n : present.shape) size *= static_cast<size_t>(n);
      feed.shape = present.shape;
      feed.bytes.assign(static_cast<const char*>(present.data), size);
    }
    tokens.push_back(static_cast<int64_t>(best - start));
    fresh = {tokens.back()};
    done = total;
    say(tokens.back());
  }
  return tokens;
}

struct Asked {
  std::string folder = ".", target;
  bool check = false;
  size_t generate = 0;
};

inline Asked asked_of(int argc, char** argv) {
  Asked asked;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool more = i + 1 < argc;
    if (word == "--check") asked.check = true;
    else if (word == "--target" && more) asked.target = argv[++i];
    else if (word == "--generate" && more) asked.generate = std::stoul(argv[++i]);
    else asked.folder = word;
  }
  return asked;
}

// Known answers, timed; then a decoder's continuation; or tokens, where they were asked for.
template <class Session>
void work(Session& session, const Json& manifest, const Asked& asked) {
  const auto prompt_of = [&] {
    std::vector<int64_t> found;
    for (const Json& token : manifest["generation"]["prompt"].list) found.push_back(token.integer());
    return found;
  };
  if (asked.generate) {
    if (manifest["generation"].null()) throw CheckError("this model does not generate tokens");
    generate(session, manifest, prompt_of(), asked.generate, [](int64_t token) {
      std::printf("%lld ", static_cast<long long>(token));
      std::fflush(stdout);
    });
    std::printf("\n");
    return;
  }
  for (const Json& known : manifest["answers"].list) {
    const std::string bytes = read_file(asked.folder, known["file"].text);
    const std::vector<Feed> feeds = inputs_of(bytes, known);
    const double factor = check_answer(bytes, known, session.run(feeds));
    const auto started = std::chrono::steady_clock::now();
    session.run(feeds);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - started;
    std::printf("%s: %s, %.2f of the bound, %.1f ms\n", known["name"].text.c_str(),
                factor <= 1 ? "right" : "imprecise", factor, took.count());
  }
  if (!asked.check) return;
  if (!manifest["generation"].null()) {
    const auto& expected = manifest["generation"]["tokens"].list;
    const auto found = generate(session, manifest, prompt_of(), expected.size(), [](int64_t) {});
    for (size_t i = 0; i < found.size(); ++i)
      if (found[i] != expected[i].integer())
        throw CheckError("generation: token " + std::to_string(i) + " is " +
                         std::to_string(found[i]) + ", not " +
                         std::to_string(expected[i].integer()));
  }
  std::printf("all checks passed\n");
}

}  // namespace bundle
