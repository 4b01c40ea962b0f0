// HAP_*: memory, clock, power and log; and the table of all exported symbols.

#include "dsp.h"

// Opens the memory that a descriptor of the host refers to.
static long open_mapping(const struct mapping *mapping) {
  char path[48] = "/proc/";
  uint32_t at = 6;
  uint32_t numbers[2] = {(uint32_t)control->host_pid,
                         (uint32_t)mapping->kernel_fd};
  for (uint32_t i = 0; i < 2; i++) {
    char digits[10];
    uint32_t count = 0;
    for (uint32_t rest = numbers[i]; rest || !count; rest /= 10)
      digits[count++] = (char)('0' + rest % 10);
    while (count)
      path[at++] = digits[--count];
    if (i == 0) {
      memcpy(path + at, "/fd/", 4);
      at += 4;
    }
  }
  path[at] = 0;
  const long here = -100, read_write = 2;
  return system_call(SYS_OPENAT, here, (long)path, read_write, 0, 0, 0);
}

// The library's mappings, and from which of the host's buffers.
#define MAX_MAPPED 4096
static struct mapped {
  void *at;
  struct mapping *mapping;
} mapped[MAX_MAPPED];

static void remember(void *at, struct mapping *mapping) {
  for (uint32_t i = 0; i < MAX_MAPPED; i++)
    if (!mapped[i].at) {
      mapped[i] = (struct mapped){at, mapping};
      __atomic_store_n(&mapping->unmapped, 0, __ATOMIC_SEQ_CST);
      return;
    }
  die("more than %u mappings", MAX_MAPPED);
}

static void forget(void *at) {
  for (uint32_t i = 0; i < MAX_MAPPED; i++)
    if (mapped[i].at == at) {
      __atomic_store_n(&mapped[i].mapping->unmapped, 1, __ATOMIC_SEQ_CST);
      mapped[i].at = NULL;
      return;
    }
  die("HAP_munmap of memory that is not mapped");
}

void *HAP_mmap(void *address, int bytes, int protection, int flags, int fd,
               long offset) {
  (void)address, (void)protection, (void)flags;
  void *failed = (void *)-1;
  for (uint32_t i = 0; i < MAPPINGS; i++) {
    struct mapping *mapping = &control->mappings[i];
    uint32_t known = __atomic_load_n(&mapping->bytes, __ATOMIC_SEQ_CST);
    if (!known || mapping->fd != fd)
      continue;
    if (bytes <= 0 || (uint32_t)bytes > known || offset ||
        ((control->rules & RULE_WHOLE_PAGES) && (uint32_t)bytes % PAGE)) {
      say("HAP_mmap of %d bytes of a mapping of %u", bytes, known);
      return failed;
    }
    long file = open_mapping(mapping);
    if (is_error(file))
      return failed;
    const long read_write = 3, shared = 1;
    long at = system_call(SYS_MMAP, 0, bytes, read_write, shared, file, 0);
    system_call(SYS_CLOSE, file, 0, 0, 0, 0, 0);
    if (is_error(at))
      return failed;
    remember((void *)at, mapping);
    return (void *)at;
  }
  say("HAP_mmap of descriptor %d, which the host has not mapped", fd);
  return failed;
}

int HAP_munmap(void *address, int bytes) {
  forget(address);
  return system_call(SYS_MUNMAP, (long)address, bytes, 0, 0, 0, 0) != 0;
}

// The library reads the time before it waits. On a device a thread of the
// resource manager could call the release callback then; here this thread calls
// it.
uint64_t HAP_perf_get_time_us(void) {
  ask_for_release();
  return now_us();
}

// SOURCE: types as in hexagon-ops/skel/src/power.rs; the refusal as reported in
// llama.cpp issue 22352.
#define SET_DCVS_V3 12
#define SET_HMX 13
#define SET_HMX_V2 14
#define REFUSED ((int)0x80000414)

int HAP_power_set(void *context, void *request) {
  (void)context;
  uint8_t type = *(uint8_t *)request;
  int refused =
      (control->rules & RULE_VOTES) && (type == SET_HMX || type == SET_HMX_V2);
  note("HAP_power_set of type %u%s", type, refused ? " refused" : "");
  const uint8_t *payload = (uint8_t *)request + 8;
  const uint8_t *core = payload + 12, *bus = payload + 32;
  if (type == SET_DCVS_V3)
    note("clocks: follow %u, option %u, core %u (%u to %u), bus %u (%u to %u), "
         "awake %u",
         payload[1], payload[2], core[0], core[1], core[2], bus[0], bus[1],
         bus[2], payload[77]);
  return refused ? REFUSED : 0;
}

void HAP_debug_v2(int level, const char *file, int line, const char *format,
                  ...) {
  (void)level, (void)file, (void)line;
  va_list args;
  va_start(args, format);
  say_list("HAP_debug: ", format, args);
  va_end(args);
}

uint64_t HAP_mem_available_stack(void) {
  uint8_t *here = __builtin_frame_address(0);
  return (uint32_t)(here - this_thread()->stack);
}

struct attributes;
int compute_resource_query_VTCM(uint32_t, uint32_t *, void *, uint32_t *,
                                void *);
int compute_resource_attr_init(void *);
int compute_resource_attr_set_serialize(void *, uint8_t);
int compute_resource_attr_set_hmx_param(void *, uint8_t);
int compute_resource_attr_set_release_callback(void *,
                                               int (*)(uint32_t, void *),
                                               void *);
int compute_resource_update_priority(uint32_t, uint16_t);
int compute_resource_attr_set_vtcm_param(void *, uint32_t, uint8_t);
uint32_t compute_resource_acquire(void *, uint32_t);
void *compute_resource_attr_get_vtcm_ptr(void *);
int compute_resource_release(uint32_t);
int compute_resource_hmx_lock(uint32_t);
int compute_resource_hmx_unlock(uint32_t);

struct thread_attributes;
int qurt_thread_create(uint32_t *, const struct thread_attributes *,
                       void (*)(void *), void *);
int qurt_thread_join(uint32_t, int *);
int qurt_futex_wait(void *, int);
int qurt_futex_wake(void *, int);
int qurt_hvx_get_units(void);
uint32_t qurt_thread_get_id(void);
int qurt_thread_get_priority(uint32_t);

int sysmon_set_dcvs_v3_protected_bus_corners(void *request, uint8_t enable) {
  note("protected corners of the bus: %u", enable);
  (void)request;
  return 0;
}

// Real shells export these symbols, too, but no public unsigned library imports
// them, so ours must not.
static int unused(void) {
  die("a function that no public library calls");
  return 0;
}

#define EXPORT(symbol) {#symbol, (void *)symbol}
#define EXPORT_UNUSED(symbol) {#symbol, (void *)unused}

static const struct {
  const char *name;
  void *at;
} exports[] = {
    EXPORT(HAP_mmap),
    EXPORT(HAP_munmap),
    EXPORT(HAP_perf_get_time_us),
    EXPORT(HAP_power_set),
    EXPORT(HAP_debug_v2),
    EXPORT(HAP_mem_available_stack),
    EXPORT(compute_resource_query_VTCM),
    EXPORT(compute_resource_attr_init),
    EXPORT(compute_resource_attr_set_serialize),
    EXPORT(compute_resource_attr_set_hmx_param),
    EXPORT(compute_resource_attr_set_release_callback),
    EXPORT(compute_resource_update_priority),
    EXPORT(compute_resource_attr_set_vtcm_param),
    EXPORT(compute_resource_acquire),
    EXPORT(compute_resource_attr_get_vtcm_ptr),
    EXPORT(compute_resource_release),
    EXPORT(compute_resource_hmx_lock),
    EXPORT(compute_resource_hmx_unlock),
    EXPORT(qurt_futex_wait),
    EXPORT(qurt_futex_wake),
    EXPORT(qurt_hvx_get_units),
    EXPORT(qurt_thread_get_id),
    EXPORT(qurt_thread_get_priority),
    EXPORT(qurt_thread_create),
    EXPORT(qurt_thread_join),
    EXPORT(sysmon_set_dcvs_v3_protected_bus_corners),
    EXPORT_UNUSED(pthread_attr_init),
    EXPORT_UNUSED(pthread_attr_setstacksize),
    EXPORT_UNUSED(pthread_create),
    EXPORT_UNUSED(pthread_join),
    EXPORT_UNUSED(qurt_thread_set_priority),
};

static int is_blacklisted(const char *name) {
  const char *next = control->blacklist;
  while (*next) {
    const char *letter = name;
    for (next++; *next && *next != ' '; next++)
      letter = letter && *letter == *next ? letter + 1 : NULL;
    if (letter && !*letter)
      return 1;
  }
  return 0;
}

// The shells of some chips lack this symbol.
static int is_missing(const char *name) {
  // SOURCE: the list of shells in docs/results/evidence.md.
  if (same(name, "sysmon_set_dcvs_v3_protected_bus_corners"))
    return control->arch < 0x79;
  return (control->rules & RULE_NO_PRIORITY) &&
         same(name, "compute_resource_update_priority");
}

void *shell_symbol(const char *name) {
  if (is_blacklisted(name))
    die("symbol %s is blacklisted", name);
  if (is_missing(name))
    return NULL;
  for (uint32_t i = 0; i < sizeof exports / sizeof *exports; i++)
    if (same(name, exports[i].name))
      return exports[i].at;
  return NULL;
}
