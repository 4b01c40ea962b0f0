#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernel.h"

// Mainline's context banks have a 32-bit DMA mask.
struct rules rules = {.whole_pages = 1, .window_bytes = 1ull << 32, .dsps = 1};
int verbose;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

int rule_take(int *count) {
  pthread_mutex_lock(&mutex);
  int left = *count > 0 ? (*count)-- : 0;
  pthread_mutex_unlock(&mutex);
  return left;
}

static void line(const char *format, va_list args) {
  char text[512] = "[loop] ";
  size_t head = strlen(text);
  vsnprintf(text + head, sizeof text - head - 1, format, args);
  strcat(text, "\n");
  ssize_t written = write(2, text, strlen(text));
  (void)written;
}

void note(const char *format, ...) {
  if (!verbose)
    return;
  va_list args;
  va_start(args, format);
  line(format, args);
  va_end(args);
}

void report(const char *format, ...) {
  va_list args;
  va_start(args, format);
  line(format, args);
  va_end(args);
}

static void refuse_symbol(const char *symbol) {
  size_t used = strlen(rules.blacklist), left = sizeof rules.blacklist - used;
  if (snprintf(rules.blacklist + used, left, " %s", symbol) >= (int)left) {
    report("LOOP_RULES: the blacklist is too long at %s", symbol);
    _exit(2);
  }
}

static void apply(const char *name, const char *value) {
  long long number = value ? strtoll(value, NULL, 0) : 1;
  if (!strcmp(name, "any-length"))
    rules.whole_pages = 0;
  else if (!strcmp(name, "window"))
    rules.window_bytes = (uint64_t)number;
  else if (!strcmp(name, "interrupt"))
    rules.interrupts = (int)number;
  else if (!strcmp(name, "restart"))
    rules.restarts = (int)number;
  else if (!strcmp(name, "map-failed"))
    rules.mmap_fails_at = (int)number;
  else if (!strcmp(name, "votes"))
    rules.refuse_votes = 1;
  else if (!strcmp(name, "dma-stuck"))
    rules.dma_stuck = 1;
  else if (!strcmp(name, "no-ieee"))
    rules.no_ieee = 1;
  else if (!strcmp(name, "workers"))
    rules.workers = (uint32_t)number + 1;
  else if (!strcmp(name, "blacklist") && value)
    refuse_symbol(value);
  else if (!strcmp(name, "no-weak"))
    rules.no_weak = 1;
  else if (!strcmp(name, "no-priority"))
    rules.no_priority = 1;
  else if (!strcmp(name, "no-hmx"))
    rules.no_hmx = 1;
  else if (!strcmp(name, "vtcm") && number > 0 && number <= VTCM_BYTES)
    rules.vtcm_bytes = (uint32_t)number;
  else if (!strcmp(name, "vanish"))
    rules.vanish = 1;
  else if (!strcmp(name, "late-unmap"))
    rules.late_unmap = 1;
  else if (!strcmp(name, "unmap-failed"))
    rules.unmap_fails_at = (int)number;
  else if (!strcmp(name, "dsps") && number > 0 && number <= MOST_DSPS)
    rules.dsps = (int)number;
  else if (!strcmp(name, "vtcm-held"))
    rules.vtcm_held_ms = (uint32_t)number;
  else {
    report("LOOP_RULES: unknown rule %s", name);
    _exit(2);
  }
}

void rules_init(void) {
  verbose = getenv("LOOP_LOG") != NULL;
  const char *list = getenv("LOOP_RULES");
  if (!list)
    return;
  char *copy = strdup(list), *rest = copy;
  for (char *rule; (rule = strsep(&rest, ","));) {
    char *value = strchr(rule, '=');
    if (value)
      *value++ = 0;
    if (*rule)
      apply(rule, value);
  }
  free(copy);
}
