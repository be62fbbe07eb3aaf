/* Gives each tensor memory of its own between pages that nobody may touch.

   libtorch allocates tensors with posix_memalign. Each allocation is a mapping: a page that holds the mapping's
   length, a guard, the memory (its end at the end of a page), a guard. Freed memory is unmapped and its
   addresses are not used again. report_fault says where a fault's address, and 1 if it was a write, are noted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <ucontext.h>

#define PAGE ((size_t)4096)
#define GUARD ((size_t)1 << 20)
#define FIRST ((uintptr_t)0x100000000000)
#define LAST ((uintptr_t)0x500000000000)

static uintptr_t next_base = FIRST;

int posix_memalign(void **out, size_t alignment, size_t size) {
  if (alignment > PAGE || size > ((size_t)1 << 40)) return ENOMEM;
  size_t rounded = size ? (size + 63) / 64 * 64 : 64;
  size_t body = (rounded + PAGE - 1) / PAGE * PAGE, length = PAGE + GUARD + body + GUARD;
  uintptr_t base = __atomic_fetch_add(&next_base, length, __ATOMIC_RELAXED);
  if (base + length > LAST) return ENOMEM;
  char *mapped = mmap((void *)base, length, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (mapped == MAP_FAILED) return ENOMEM;
  if (mprotect(mapped, PAGE, PROT_READ | PROT_WRITE) ||
      mprotect(mapped + PAGE + GUARD, body, PROT_READ | PROT_WRITE)) {
    munmap(mapped, length);
    return ENOMEM;
  }
  *(size_t *)mapped = length;
  *out = mapped + PAGE + GUARD + (body - rounded);
  return 0;
}

void free(void *pointer) {
  static void (*real)(void *);
  uintptr_t user = (uintptr_t)pointer;
  if (user >= FIRST && user < LAST) {
    char *base = (char *)(user / PAGE * PAGE - GUARD - PAGE);
    munmap(base, *(size_t *)base);
    return;
  }
  if (!real) real = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  real(pointer);
}

static uint64_t *noted;

static void note_fault(int number, siginfo_t *info, void *context) {
  noted[0] = (uint64_t)info->si_addr;
  noted[1] = ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] >> 1 & 1;
  signal(number, SIG_DFL);
  raise(number);
}

void report_fault(uint64_t *where) {
  static char stack[1 << 16];
  stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
  struct sigaction action = {.sa_sigaction = note_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  noted = where;
  sigaltstack(&other, 0);
  sigaction(SIGSEGV, &action, 0);
  sigaction(SIGBUS, &action, 0);
}
