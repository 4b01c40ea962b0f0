// The emulator's system calls, and the few C functions that need no library.

#include "dsp.h"

void *memcpy(void *to, const void *from, size_t bytes) {
  uint8_t *t = to;
  const uint8_t *f = from;
  if ((((uintptr_t)t | (uintptr_t)f) & 7) == 0)
    for (; bytes >= 8; bytes -= 8, t += 8, f += 8)
      *(uint64_t *)t = *(const uint64_t *)f;
  while (bytes--)
    *t++ = *f++;
  return to;
}

void *memset(void *at, int value, size_t bytes) {
  uint8_t *a = at;
  uint64_t word = (uint8_t)value * 0x0101010101010101u;
  if (((uintptr_t)a & 7) == 0)
    for (; bytes >= 8; bytes -= 8, a += 8)
      *(uint64_t *)a = word;
  while (bytes--)
    *a++ = (uint8_t)value;
  return at;
}

int same(const char *a, const char *b) {
  while (*a && *a == *b)
    a++, b++;
  return *a == *b;
}

struct text {
  char bytes[400];
  uint32_t count;
};

static void put(struct text *text, char c) {
  if (text->count < sizeof text->bytes - 1)
    text->bytes[text->count++] = c;
}

static void put_hex(struct text *text, uint64_t number) {
  uint32_t shift = 60;
  while (shift && !(number >> shift))
    shift -= 4;
  for (;; shift -= 4) {
    put(text, "0123456789abcdef"[number >> shift & 15]);
    if (!shift)
      return;
  }
}

// By limbs of 16 bits, because a 64-bit division would need a library.
static void put_decimal(struct text *text, uint64_t number) {
  char digits[20];
  uint32_t count = 0;
  do {
    uint64_t quotient = 0;
    uint32_t rest = 0;
    for (int shift = 48; shift >= 0; shift -= 16) {
      rest = rest << 16 | (uint32_t)(number >> shift & 0xffff);
      quotient = quotient << 16 | rest / 10;
      rest %= 10;
    }
    digits[count++] = (char)('0' + rest);
    number = quotient;
  } while (number);
  while (count)
    put(text, digits[--count]);
}

// Handles the conversions that the libraries and this process use; widths are
// ignored.
static void format_list(struct text *text, const char *format, va_list args) {
  for (; *format; format++) {
    if (*format != '%') {
      put(text, *format);
      continue;
    }
    uint32_t longs = 0;
    format++;
    while ((*format >= '0' && *format <= '9') || *format == '#' ||
           *format == '.' || *format == '-' || *format == 'z')
      format++;
    for (; *format == 'l'; format++)
      longs++;
    if (*format == 'd' || *format == 'i') {
      int64_t number = longs > 1 ? va_arg(args, int64_t) : va_arg(args, int);
      if (number < 0)
        put(text, '-');
      put_decimal(text, number < 0 ? 0 - (uint64_t)number : (uint64_t)number);
      continue;
    }
    if (*format == 's') {
      for (const char *s = va_arg(args, const char *); s && *s; s++)
        put(text, *s);
      continue;
    }
    if (*format == '%') {
      put(text, '%');
      continue;
    }
    uint64_t bits = longs > 1 ? va_arg(args, uint64_t) : va_arg(args, uint32_t);
    if (*format == 'u')
      put_decimal(text, bits);
    else
      put_hex(text, bits);
  }
  text->bytes[text->count] = 0;
}

static void put_string(struct text *text, const char *string) {
  while (*string)
    put(text, *string++);
}

static void write_line(struct text *text) {
  text->bytes[text->count++] = '\n';
  system_call(SYS_WRITE, 2, (long)text->bytes, (long)text->count, 0, 0, 0);
}

void say_list(const char *head, const char *format, va_list args) {
  struct text text = {.count = 0};
  put_string(&text, "[dsp ");
  put_decimal(&text, control->process);
  put_string(&text, "] ");
  put_string(&text, head);
  format_list(&text, format, args);
  write_line(&text);
}

void say(const char *format, ...) {
  va_list args;
  va_start(args, format);
  say_list("", format, args);
  va_end(args);
}

void note(const char *format, ...) {
  if (!control->verbose)
    return;
  va_list args;
  va_start(args, format);
  say_list("", format, args);
  va_end(args);
}

void die(const char *format, ...) {
  struct text text = {.count = 0};
  va_list args;
  va_start(args, format);
  format_list(&text, format, args);
  va_end(args);
  uint32_t bytes = text.count + 1;
  if (bytes > sizeof control->message)
    bytes = sizeof control->message;
  memcpy(control->message, text.bytes, bytes);
  control->message[bytes - 1] = 0;
  system_call(SYS_EXIT_GROUP, 1, 0, 0, 0, 0, 0);
  __builtin_trap();
}

uint64_t now_us(void) {
  // Two words of 32 or 64 bits, seconds and nanoseconds.
  uint32_t time[4] = {0, 0, 0, 0};
  const long monotonic = 1;
  system_call(SYS_CLOCK_GETTIME, monotonic, (long)time, 0, 0, 0, 0);
  return (uint64_t)time[0] * 1000000 + time[1] / 1000;
}

uint8_t *map(size_t bytes, int fd, long offset_bytes) {
  const long read_write_execute = 7, shared = 1, private_anonymous = 0x22;
  long result =
      system_call(SYS_MMAP, 0, (long)bytes, read_write_execute,
                  fd < 0 ? private_anonymous : shared, fd, offset_bytes / 4096);
  if (is_error(result))
    die("no memory: %u bytes of descriptor %d, error %d", (uint32_t)bytes, fd,
        (int)-result);
  return (uint8_t *)result;
}
