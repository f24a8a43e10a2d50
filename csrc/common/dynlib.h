// Loads a shared library at run time into a table of function pointers. Their types come from the
// vendor's header: a signature that differs from the header's cannot compile.
//
//   #define FOO_FUNCTIONS(X) X(foo_open) X(foo_close)
//   MK_DYNLIB(FooLibrary, "libfoo.so.1", FOO_FUNCTIONS)
//
//   FooLibrary::get().p_foo_open(...);      // throws Unavailable with the loader's message
//   if (!FooLibrary::reason().empty()) ...  // why it is missing; empty if it is loaded
//
// A library that lacks one of the functions counts as absent, so functions that only newer versions
// have belong in a separate table. The members are called p_<name> because some names are
// function-like macros in their header (ibv_reg_mr, ibv_query_port).
//
// Layer: common.
#pragma once

#include <dlfcn.h>

#include <string>

#include "common/check.h"

#define MK_STRING_(x) #x
#define MK_STRING(x) MK_STRING_(x)  // in two steps, so that cuda.h's cuFoo -> cuFoo_v2 expands

#define MK_DYNLIB_MEMBER_(function) decltype(&::function) p_##function = nullptr;
#define MK_DYNLIB_LOAD_(function)                                                               \
  if (error.empty()) {                                                                          \
    p_##function = reinterpret_cast<decltype(&::function)>(dlsym(handle, MK_STRING(function))); \
    if (!p_##function) error = ::mk::concat(MK_STRING(function), ": ", dlerror());              \
  }

#define MK_DYNLIB(Name, soname, FUNCTIONS)                                                   \
  class Name {                                                                               \
   public:                                                                                   \
    FUNCTIONS(MK_DYNLIB_MEMBER_)                                                             \
                                                                                             \
    static const Name& get() {                                                               \
      if (!instance().error.empty()) throw ::mk::Unavailable(instance().error);              \
      return instance();                                                                     \
    }                                                                                        \
    static const std::string& reason() { return instance().error; }                          \
                                                                                             \
   private:                                                                                  \
    Name() : handle(dlopen(soname, RTLD_NOW | RTLD_LOCAL)) {                                 \
      if (!handle) error = dlerror();                                                        \
      FUNCTIONS(MK_DYNLIB_LOAD_)                                                             \
    }                                                                                        \
    /* Loaded once, and never closed: its functions may be in use until the process ends. */ \
    static const Name& instance() {                                                          \
      static const Name table;                                                               \
      return table;                                                                          \
    }                                                                                        \
    void* handle;                                                                            \
    std::string error;                                                                       \
  };
