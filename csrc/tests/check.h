// The smallest test harness: TEST(name) { CHECK(...); }, found and run by main.cpp.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

#define TEST(name)                                 \
  static void name();                              \
  static const Register register_##name{#name, name}; \
  static void name()

#define CHECK(...)                                                                \
  do {                                                                            \
    if (!(__VA_ARGS__)) {                                                         \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)
