// What a newer glibc or libstdc++ makes this module need, defined here once more from what older ones have. Built on a
// recent machine it so runs with glibc 2.28 and the libstdc++ of GCC 8: manylinux_2_28, which auditwheel checks.
//
// Each definition is hidden, that is, only our own objects and nanobind's call it. Nothing is included: a declaration of
// the library's own would be in the way.
#if defined(__linux__) && defined(__gnu_linux__) && (defined(__x86_64__) || defined(__aarch64__))

#ifdef __x86_64__
#define SPECSERVE_FIRST_GLIBC "GLIBC_2.2.5"
#else
#define SPECSERVE_FIRST_GLIBC "GLIBC_2.17"
#endif
#define SPECSERVE_HIDDEN extern "C" __attribute__((visibility("hidden")))
// `older` is the function `name` as it was in `version`, which every later release of the library still has.
#define SPECSERVE_OLDER(older, name, version) __asm__(".symver " #older ", " name "@" version)

// glibc 2.29: the same results, without setting errno.
#define SPECSERVE_OLDER_MATH(name)                             \
  extern "C" double older_##name(double);                      \
  SPECSERVE_OLDER(older_##name, #name, SPECSERVE_FIRST_GLIBC); \
  SPECSERVE_HIDDEN double our_##name(double) __asm__(#name);   \
  double our_##name(double x) { return older_##name(x); }
SPECSERVE_OLDER_MATH(exp)
SPECSERVE_OLDER_MATH(log)
SPECSERVE_OLDER_MATH(log2)

// glibc 2.32: whether std::shared_ptr may count without atomic operations. It may not.
SPECSERVE_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// GCC 14: an exception that leaves a noexcept function.
extern "C" void* __cxa_begin_catch(void* exception);
extern "C" [[noreturn]] void terminate() __asm__("_ZSt9terminatev");
SPECSERVE_HIDDEN [[noreturn]] void call_terminate(void* exception) __asm__("__cxa_call_terminate");
void call_terminate(void* exception) {
  __cxa_begin_catch(exception);
  terminate();
}

// GCC 12: a wait that may be cancelled.
#define SPECSERVE_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
extern "C" void older_wait(void* condition, void* lock);
SPECSERVE_OLDER(older_wait, SPECSERVE_WAIT, "GLIBCXX_3.4.11");
SPECSERVE_HIDDEN void condition_variable_wait(void* condition, void* lock) __asm__(SPECSERVE_WAIT);
void condition_variable_wait(void* condition, void* lock) { older_wait(condition, lock); }

// GCC 11: what std::allocator throws for sizes that overflow; `new` with such a size has always thrown it so.
extern "C" void __cxa_throw_bad_array_new_length();
SPECSERVE_HIDDEN void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { __cxa_throw_bad_array_new_length(); }

// GCC 11: the two halves of copying and destroying a std::exception_ptr, which has been one pointer in all releases.
#define SPECSERVE_EXCEPTION_PTR "_ZNSt15__exception_ptr13exception_ptr"
extern "C" void copy_exception_ptr(void* to, const void* from) __asm__(SPECSERVE_EXCEPTION_PTR "C1ERKS0_");
extern "C" void destroy_exception_ptr(void* pointer) __asm__(SPECSERVE_EXCEPTION_PTR "D1Ev");
SPECSERVE_HIDDEN void add_reference(void* pointer) __asm__(SPECSERVE_EXCEPTION_PTR "9_M_addrefEv");
void add_reference(void* pointer) {
  void* counted;  // and never destroyed
  copy_exception_ptr(&counted, pointer);
}
SPECSERVE_HIDDEN void release(void* pointer) __asm__(SPECSERVE_EXCEPTION_PTR "10_M_releaseEv");
void release(void* pointer) { destroy_exception_ptr(pointer); }

#endif
