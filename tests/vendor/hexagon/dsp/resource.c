// compute_resource_*: VTCM, which all processes share, and the matrix unit.

#include "dsp.h"

uint8_t *vtcm;
uint32_t matrix_locked;
static struct vtcm_owner *owner;
static uint32_t held;
static int (*release_callback)(uint32_t, void *);
static void *release_context;
// 1 if the holder has a lower priority than the threads that wait.
static uint32_t is_low;
static uint32_t is_asked;

// There is one resource, with this number.
#define RESOURCE 7u
#define VTCM_ALIGNMENT (1u << 20)

void map_vtcm(void) {
  const long read_write = 3, shared_fixed = 0x11;
  uint32_t room = (uint32_t)map(VTCM_BYTES + VTCM_ALIGNMENT, -1, 0);
  room = (room + VTCM_ALIGNMENT - 1) / VTCM_ALIGNMENT * VTCM_ALIGNMENT;
  long at = system_call(SYS_MMAP, (long)room, VTCM_BYTES, read_write,
                        shared_fixed, VTCM_FD, 0);
  if (is_error(at))
    die("VTCM cannot be mapped, error %d", (int)-at);
  vtcm = (uint8_t *)at;
  owner = (struct vtcm_owner *)map(VTCM_FILE_BYTES - VTCM_BYTES, VTCM_FD,
                                   VTCM_BYTES);
}

int compute_resource_query_VTCM(uint32_t application, uint32_t *total,
                                void *layout, uint32_t *available,
                                void *available_layout) {
  (void)application, (void)layout, (void)available_layout;
  if (total)
    *total = control->vtcm_bytes;
  if (available)
    *available = owner->process == VTCM_FREE ? control->vtcm_bytes : 0;
  return 0;
}

int compute_resource_attr_init(void *attributes) {
  memset(attributes, 0, 64);
  return 0;
}

int compute_resource_attr_set_serialize(void *attributes, uint8_t enable) {
  (void)attributes, (void)enable;
  return 0;
}

int compute_resource_attr_set_hmx_param(void *attributes, uint8_t enable) {
  (void)attributes, (void)enable;
  return 0;
}

int compute_resource_attr_set_vtcm_param(void *attributes, uint32_t bytes,
                                         uint8_t single_page) {
  (void)attributes, (void)single_page;
  return bytes > control->vtcm_bytes;
}

int compute_resource_attr_set_release_callback(
    void *attributes, int (*callback)(uint32_t, void *), void *context) {
  (void)attributes;
  release_callback = callback;
  release_context = context;
  return 0;
}

static int take(void) {
  uint32_t other = VTCM_OTHER, nobody = VTCM_FREE;
  if (owner->process == VTCM_OTHER &&
      (int32_t)((uint32_t)(now_us() / 1000) - owner->other_until_ms) >= 0)
    __atomic_compare_exchange_n(&owner->process, &other, VTCM_FREE, 0,
                                __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return __atomic_compare_exchange_n(&owner->process, &nobody, control->process,
                                     0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

uint32_t compute_resource_acquire(void *attributes, uint32_t timeout_us) {
  (void)attributes;
  uint64_t end = now_us() + timeout_us;
  uint32_t is_taken = 0;
  __atomic_fetch_add(&owner->waiting, 1, __ATOMIC_SEQ_CST);
  while (!(is_taken = take()) && now_us() < end) {
    long millisecond[4] = {0, 1000000, 0, 0};
    system_call(SYS_NANOSLEEP, (long)millisecond, 0, 0, 0, 0, 0);
  }
  __atomic_fetch_sub(&owner->waiting, 1, __ATOMIC_SEQ_CST);
  if (!is_taken)
    return 0;
  held = 1;
  is_low = is_asked = 0;
  return RESOURCE;
}

void *compute_resource_attr_get_vtcm_ptr(void *attributes) {
  (void)attributes;
  return held ? vtcm : NULL;
}

static void check(const char *what, uint32_t resource) {
  if (resource != RESOURCE || !held)
    die("%s of resource %u, which is not held", what, resource);
}

int compute_resource_update_priority(uint32_t resource, uint16_t priority) {
  check("priority", resource);
  if (priority > 254)
    die("priority %u of a resource", priority);
  is_low = 1;
  return 0;
}

void ask_for_release(void) {
  if (!held || !is_low || is_asked || !release_callback ||
      !__atomic_load_n(&owner->waiting, __ATOMIC_SEQ_CST))
    return;
  is_asked = 1;
  release_callback(RESOURCE, release_context);
}

int compute_resource_release(uint32_t resource) {
  check("release", resource);
  if (matrix_locked)
    die("release while the matrix unit is locked");
  held = 0;
  __atomic_store_n(&owner->process, VTCM_FREE, __ATOMIC_SEQ_CST);
  return 0;
}

int compute_resource_hmx_lock(uint32_t resource) {
  check("lock", resource);
  if (matrix_locked || control->rules & RULE_NO_HMX)
    return 1;
  matrix_locked = this_thread()->index + 1;
  return 0;
}

int compute_resource_hmx_unlock(uint32_t resource) {
  check("unlock", resource);
  if (matrix_locked != this_thread()->index + 1)
    die("unlock by another thread");
  matrix_locked = 0;
  return 0;
}
