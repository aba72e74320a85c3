/* A stand-in for libnvidia-ml.so.1: cards and faults come from a text file that is read again whenever it changed.
 *
 * FALLOW_NVML_SCRIPT names the file. Without it the library says that no driver is loaded (9). Lines are
 *
 *     init CODE | driver VERSION | order ID ID ... | error FUNCTION CODE | hang FUNCTION MILLISECONDS | event ID XID
 *     card ID KEY VALUE          (any KEY; numbers in NVML's own units)
 *     card ID error FUNCTION CODE | card ID lost CODE
 *     card ID compute|graphics PID BYTES|none
 *
 * `order` says which card has which index (default: by ID). Every structure has the layout that the real ABI has.
 * Functions that nothing here implements are generated beside this file, and return 3 (not supported).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_CARDS 16
#define MAX_KEYS 64
#define MAX_FAULTS 64
#define MAX_PROCESSES 64
#define NONE UINT64_MAX
#define API __attribute__((visibility("default")))
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10,
       LOST = 15, VERSION = 25 };

typedef struct { char key[40]; char value[96]; } pair_t;
typedef struct { char function[72]; int code; } fault_t;
typedef struct { int graphics; unsigned pid; uint64_t bytes; } process_t;
typedef struct {
    int id, there, lost, n_keys, n_faults, n_processes;
    pair_t keys[MAX_KEYS];
    fault_t faults[MAX_FAULTS];
    process_t processes[MAX_PROCESSES];
} card_t;

static card_t cards[MAX_CARDS];
static fault_t faults[MAX_FAULTS], hangs[MAX_FAULTS];
static int n_faults, n_hangs, order[MAX_CARDS], n_order, init_code, ready, inits, opened, event_seen[MAX_CARDS];
static struct { int card; uint64_t xid; } events[MAX_FAULTS];
static int n_events, events_taken;
static char driver[80];
static struct timespec seen;
static off_t seen_size = -1;
static ino_t seen_inode;

static void keep_fault(fault_t *table, int *count, const char *function, const char *code) {
    if (*count >= MAX_FAULTS || !function || !code) return;
    snprintf(table[*count].function, sizeof table[*count].function, "%s", function);
    table[(*count)++].code = atoi(code);
}

static void read_card(int id, char *rest) {
    if (id < 0 || id >= MAX_CARDS) return;
    card_t *card = &cards[id];
    card->id = id;
    card->there = 1;
    char *key = strtok(NULL, " \n");
    (void)rest;
    if (!key) return;
    if (!strcmp(key, "error")) {
        char *function = strtok(NULL, " \n"), *code = strtok(NULL, " \n");
        keep_fault(card->faults, &card->n_faults, function, code);
    } else if (!strcmp(key, "lost")) {
        char *code = strtok(NULL, " \n");
        card->lost = code ? atoi(code) : LOST;
    } else if (!strcmp(key, "compute") || !strcmp(key, "graphics")) {
        char *pid = strtok(NULL, " \n"), *bytes = strtok(NULL, " \n");
        if (card->n_processes >= MAX_PROCESSES || !pid || !bytes) return;
        process_t *process = &card->processes[card->n_processes++];
        process->graphics = key[0] == 'g';
        process->pid = (unsigned)strtoul(pid, NULL, 10);
        process->bytes = strcmp(bytes, "none") ? strtoull(bytes, NULL, 10) : NONE;
    } else if (card->n_keys < MAX_KEYS) {
        char *value = strtok(NULL, "\n");
        pair_t *pair = &card->keys[card->n_keys++];
        snprintf(pair->key, sizeof pair->key, "%s", key);
        snprintf(pair->value, sizeof pair->value, "%s", value ? value : "");
    }
}

static void read_script(FILE *file) {
    char line[512];
    memset(cards, 0, sizeof cards);
    n_faults = n_hangs = n_order = n_events = init_code = 0;
    snprintf(driver, sizeof driver, "550.54.14");
    while (fgets(line, sizeof line, file)) {
        char *word = strtok(line, " \n");
        if (!word || *word == '#') continue;
        if (!strcmp(word, "init")) init_code = atoi(strtok(NULL, " \n"));
        else if (!strcmp(word, "driver")) snprintf(driver, sizeof driver, "%s", strtok(NULL, " \n"));
        else if (!strcmp(word, "order")) {
            for (char *id; (id = strtok(NULL, " \n")) && n_order < MAX_CARDS;) order[n_order++] = atoi(id);
        } else if (!strcmp(word, "error")) {
            char *function = strtok(NULL, " \n"), *code = strtok(NULL, " \n");
            keep_fault(faults, &n_faults, function, code);
        } else if (!strcmp(word, "hang")) {
            char *function = strtok(NULL, " \n"), *code = strtok(NULL, " \n");
            keep_fault(hangs, &n_hangs, function, code);
        } else if (!strcmp(word, "event") && n_events < MAX_FAULTS) {
            events[n_events].card = atoi(strtok(NULL, " \n"));
            events[n_events++].xid = strtoull(strtok(NULL, " \n"), NULL, 10);
        } else if (!strcmp(word, "card")) {
            read_card(atoi(strtok(NULL, " \n")), line);
        }
    }
    if (!n_order)
        for (int id = 0; id < MAX_CARDS; id++)
            if (cards[id].there) order[n_order++] = id;
    if (events_taken > n_events) events_taken = 0;
}

static int refresh(void) {
    const char *path = getenv("FALLOW_NVML_SCRIPT");
    struct stat status;
    if (!path || stat(path, &status)) return 0;
    if (status.st_size == seen_size && status.st_ino == seen_inode && status.st_mtim.tv_sec == seen.tv_sec &&
        status.st_mtim.tv_nsec == seen.tv_nsec)
        return 1;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    read_script(file);
    fclose(file);
    seen = status.st_mtim;
    seen_size = status.st_size;
    seen_inode = status.st_ino;
    return 1;
}

static int find_fault(const fault_t *table, int count, const char *function) {
    for (int i = 0; i < count; i++)
        if (!strcmp(table[i].function, function)) return table[i].code;
    return 0;
}

/* What every call does first: follow the script, hang if it says so, and answer the error that it names. */
static int enter(const char *function, const card_t *card) {
    if (!refresh()) return NO_DRIVER;
    int hang = find_fault(hangs, n_hangs, function), code;
    if (hang) usleep((useconds_t)hang * 1000);
    if (!ready) return UNINITIALIZED;
    if ((code = find_fault(faults, n_faults, function))) return code;
    if ((code = find_fault(faults, n_faults, "*"))) return code;
    if (!card) return OK;
    if (card < cards || card >= cards + MAX_CARDS) return INVALID;
    if (!card->there) return LOST;
    if (card->lost) return card->lost;
    return find_fault(card->faults, card->n_faults, function);
}
#define ENTER(card) do { int code_ = enter(__func__, card); if (code_) return code_; } while (0)

static const char *text(const card_t *card, const char *key) {
    for (int i = card->n_keys - 1; i >= 0; i--)
        if (!strcmp(card->keys[i].key, key)) return card->keys[i].value;
    return NULL;
}
static int number(const card_t *card, const char *key, uint64_t *value) {
    const char *found = text(card, key);
    if (!found) return UNSUPPORTED;
    *value = strtoull(found, NULL, 10);
    return OK;
}
static int small_number(const card_t *card, const char *key, unsigned *value) {
    uint64_t wide;
    int code = number(card, key, &wide);
    if (!code) *value = (unsigned)wide;
    return code;
}
static uint64_t or_zero(const card_t *card, const char *key) {
    uint64_t value = 0;
    (void)number(card, key, &value);
    return value;
}
static int copy(char *out, unsigned size, const char *value) {
    if (!value) return UNSUPPORTED;
    if (strlen(value) + 1 > size) return SMALL;
    strcpy(out, value);
    return OK;
}

/* For tests: how often the library was initialised, and how many times more than shut down. */
API int standin_inits(void) { return inits; }
API int standin_open(void) { return opened; }

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    inits++;
    if (!refresh()) return NO_DRIVER;
    int hang = find_fault(hangs, n_hangs, __func__);
    if (hang) usleep((useconds_t)hang * 1000);
    if (init_code) return init_code;
    ready = 1;
    opened++;
    return OK;
}
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlShutdown(void) {
    if (!opened) return UNINITIALIZED;
    ready = --opened > 0;
    return OK;
}
API const char *nvmlErrorString(int code) {
    static char said[40];
    snprintf(said, sizeof said, "stand-in error %d", code);
    return said;
}
API int nvmlSystemGetDriverVersion(char *out, unsigned size) { ENTER(NULL); return copy(out, size, driver); }
API int nvmlSystemGetNVMLVersion(char *out, unsigned size) { ENTER(NULL); return copy(out, size, driver); }
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER(NULL); *out = 12040; return OK; }
API int nvmlSystemGetCudaDriverVersion(int *out) { ENTER(NULL); *out = 12040; return OK; }
API int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    ENTER(NULL);
    char name[40];
    snprintf(name, sizeof name, "process-%u", pid);
    return copy(out, size, name);
}
API int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(NULL); *out = (unsigned)n_order; return OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, card_t **out) {
    ENTER(NULL);
    if (index >= (unsigned)n_order) return INVALID;
    card_t *card = &cards[order[index]];
    int code = find_fault(card->faults, card->n_faults, __func__);
    if (code || card->lost) return code ? code : card->lost;
    *out = card;
    return OK;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, card_t **out) {
    ENTER(NULL);
    for (int i = 0; i < n_order; i++) {
        card_t *card = &cards[order[i]];
        const char *found = text(card, "uuid");
        if (found && !strcmp(found, uuid)) {
            if (card->lost) return card->lost;
            *out = card;
            return OK;
        }
    }
    return NOT_FOUND;
}
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, card_t **out) {
    ENTER(NULL);
    for (int i = 0; i < n_order; i++) {
        char own[32];
        snprintf(own, sizeof own, "00000000:%02X:00.0", order[i] + 1);
        if (!strcmp(own, bus_id)) { *out = &cards[order[i]]; return OK; }
    }
    return NOT_FOUND;
}
API int nvmlDeviceGetIndex(card_t *card, unsigned *out) {
    ENTER(card);
    for (int i = 0; i < n_order; i++)
        if (order[i] == card->id) { *out = (unsigned)i; return OK; }
    return NOT_FOUND;
}
API int nvmlDeviceGetPciInfo_v3(card_t *card, pci_t *out) {
    ENTER(card);
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)card->id + 1;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
    return OK;
}
API int nvmlDeviceGetName(card_t *card, char *out, unsigned size) { ENTER(card); return copy(out, size, text(card, "name")); }
API int nvmlDeviceGetUUID(card_t *card, char *out, unsigned size) { ENTER(card); return copy(out, size, text(card, "uuid")); }
API int nvmlDeviceGetSerial(card_t *card, char *out, unsigned size) { ENTER(card); return copy(out, size, text(card, "serial")); }

typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { unsigned version; uint64_t total, reserved, free, used; } memory2_t;
API int nvmlDeviceGetMemoryInfo(card_t *card, memory_t *out) {
    ENTER(card);
    uint64_t total;
    int code = number(card, "memory_total", &total);
    if (code) return code;
    out->total = total;
    out->used = or_zero(card, "memory_used") + or_zero(card, "memory_reserved");
    out->free = total - out->used;
    if (text(card, "memory_unknown")) out->total = out->free = out->used = NONE;
    return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(card_t *card, memory2_t *out) {
    ENTER(card);
    if (out->version != 0x02000028) return VERSION;
    uint64_t total;
    int code = number(card, "memory_total", &total);
    if (code) return code;
    out->total = total;
    out->used = or_zero(card, "memory_used");
    out->reserved = or_zero(card, "memory_reserved");
    out->free = total - out->used - out->reserved;
    if (text(card, "memory_unknown")) out->total = out->reserved = out->free = out->used = NONE;
    return OK;
}
typedef struct { unsigned gpu, memory; } rates_t;
API int nvmlDeviceGetUtilizationRates(card_t *card, rates_t *out) {
    ENTER(card);
    out->memory = (unsigned)or_zero(card, "memory_utilisation");
    return small_number(card, "utilisation", &out->gpu);
}
#define SMALL_FIGURE(function, key) \
    API int function(card_t *card, unsigned *out) { ENTER(card); return small_number(card, key, out); }
SMALL_FIGURE(nvmlDeviceGetPowerUsage, "power_mw")
SMALL_FIGURE(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
SMALL_FIGURE(nvmlDeviceGetPowerManagementLimit, "power_limit_mw")
SMALL_FIGURE(nvmlDeviceGetPowerManagementDefaultLimit, "power_default_mw")
SMALL_FIGURE(nvmlDeviceGetPerformanceState, "performance_state")
SMALL_FIGURE(nvmlDeviceGetFanSpeed, "fan_pct")
SMALL_FIGURE(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
SMALL_FIGURE(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
SMALL_FIGURE(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_generation")
SMALL_FIGURE(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width")
SMALL_FIGURE(nvmlDeviceGetPcieReplayCounter, "pcie_replays")
SMALL_FIGURE(nvmlDeviceGetRetiredPagesPendingStatus, "retirement_pending")
SMALL_FIGURE(nvmlDeviceGetComputeMode, "compute_mode")
SMALL_FIGURE(nvmlDeviceGetPersistenceMode, "persistence_mode")
SMALL_FIGURE(nvmlDeviceGetDisplayMode, "display_mode")
SMALL_FIGURE(nvmlDeviceGetDisplayActive, "display_active")
API int nvmlDeviceGetPowerManagementLimitConstraints(card_t *card, unsigned *low, unsigned *high) {
    ENTER(card);
    int code = small_number(card, "power_min_mw", low);
    return code ? code : small_number(card, "power_max_mw", high);
}
API int nvmlDeviceGetTotalEnergyConsumption(card_t *card, uint64_t *out) { ENTER(card); return number(card, "energy_mj", out); }
API int nvmlDeviceGetTemperature(card_t *card, int sensor, unsigned *out) {
    ENTER(card);
    return sensor ? INVALID : small_number(card, "temperature", out);
}
typedef struct { unsigned version; int sensor, celsius; } temperature_t;
API int nvmlDeviceGetTemperatureV(card_t *card, temperature_t *out) {
    ENTER(card);
    if (out->version != 0x0100000c) return VERSION;
    return small_number(card, "temperature", (unsigned *)&out->celsius);
}
API int nvmlDeviceGetTemperatureThreshold(card_t *card, int kind, unsigned *out) {
    ENTER(card);
    return small_number(card, kind == 0 ? "temperature_shutdown" : "temperature_slowdown", out);
}
API int nvmlDeviceGetClockInfo(card_t *card, int kind, unsigned *out) {
    ENTER(card);
    return small_number(card, kind == 2 ? "memory_clock" : "sm_clock", out);
}
API int nvmlDeviceGetMaxClockInfo(card_t *card, int kind, unsigned *out) {
    ENTER(card);
    return small_number(card, kind == 2 ? "memory_clock_max" : "sm_clock_max", out);
}
API int nvmlDeviceGetCurrentClocksEventReasons(card_t *card, uint64_t *out) { ENTER(card); return number(card, "throttle", out); }
API int nvmlDeviceGetCurrentClocksThrottleReasons(card_t *card, uint64_t *out) { ENTER(card); return number(card, "throttle", out); }
API int nvmlDeviceGetPcieThroughput(card_t *card, int counter, unsigned *out) {
    (void)counter;
    ENTER(card);
    usleep(20000);
    return small_number(card, "pcie_kb_s", out);
}
API int nvmlDeviceGetEccMode(card_t *card, unsigned *current, unsigned *pending) {
    ENTER(card);
    int code = small_number(card, "ecc", current);
    if (!code) *pending = *current;
    return code;
}
API int nvmlDeviceGetTotalEccErrors(card_t *card, int kind, int counter, uint64_t *out) {
    (void)counter;
    ENTER(card);
    return number(card, kind ? "ecc_uncorrected" : "ecc_corrected", out);
}
API int nvmlDeviceGetRemappedRows(card_t *card, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER(card);
    *corrected = *pending = *failed = 0;
    if (text(card, "remap_failed")) *failed = 1;
    if (text(card, "remap_pending")) *pending = 1;
    return small_number(card, "rows_remapped", uncorrected);
}
API int nvmlDeviceGetMigMode(card_t *card, unsigned *current, unsigned *pending) {
    ENTER(card);
    int code = small_number(card, "mig", current);
    if (!code) *pending = *current;
    return code;
}

/* Processes. A driver of R535.43 to .98 writes records of 32 bytes into the caller's array of 24. */
static int processes(card_t *card, int graphics, unsigned *count, char *out) {
    unsigned found = 0;
    size_t stride = text(card, "wide_records") ? 32 : 24;
    for (int i = 0; i < card->n_processes; i++) found += card->processes[i].graphics == graphics;
    if (!found) { *count = 0; return OK; }
    if (!out || *count < found) { *count = found; return SMALL; }
    *count = found;
    for (int i = 0, at = 0; i < card->n_processes; i++) {
        process_t *process = &card->processes[i];
        if (process->graphics != graphics) continue;
        char *record = out + stride * (size_t)at++;
        unsigned whole = UINT32_MAX;
        memset(record, 0, stride);
        memcpy(record, &process->pid, 4);
        memcpy(record + 8, &process->bytes, 8);
        memcpy(record + 16, &whole, 4);
        memcpy(record + 20, &whole, 4);
    }
    return OK;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(card_t *card, unsigned *count, char *out) { ENTER(card); return processes(card, 0, count, out); }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(card_t *card, unsigned *count, char *out) { ENTER(card); return processes(card, 1, count, out); }
API int nvmlDeviceGetComputeRunningProcesses_v2(card_t *card, unsigned *count, char *out) { ENTER(card); return processes(card, 0, count, out); }
API int nvmlDeviceGetGraphicsRunningProcesses_v2(card_t *card, unsigned *count, char *out) { ENTER(card); return processes(card, 1, count, out); }
API int nvmlDeviceGetMPSComputeRunningProcesses_v3(card_t *card, unsigned *count, char *out) { (void)out; ENTER(card); *count = 0; return OK; }
API int nvmlDeviceGetProcessUtilization(card_t *card, char *out, unsigned *count, uint64_t since) {
    (void)out; (void)since;
    ENTER(card);
    *count = 0;
    return NOT_FOUND;
}

/* Events: each `event` line is handed out once. */
API int nvmlEventSetCreate(void **out) { ENTER(NULL); *out = events; return OK; }
API int nvmlEventSetFree(void *set) { (void)set; ENTER(NULL); return OK; }
API int nvmlDeviceGetSupportedEventTypes(card_t *card, uint64_t *out) { ENTER(card); *out = 8; return OK; }
API int nvmlDeviceRegisterEvents(card_t *card, uint64_t kinds, void *set) {
    (void)kinds; (void)set;
    ENTER(card);
    event_seen[card->id] = 1;
    return OK;
}
typedef struct { card_t *card; uint64_t kind, data; unsigned instance, compute; } event_t;
API int nvmlEventSetWait_v2(void *set, event_t *out, unsigned timeout_ms) {
    (void)set; (void)timeout_ms;
    ENTER(NULL);
    if (events_taken >= n_events) return TIMEOUT;
    int id = events[events_taken].card;
    memset(out, 0, sizeof *out);
    out->card = &cards[id];
    out->kind = 8;
    out->data = events[events_taken++].xid;
    out->instance = out->compute = UINT32_MAX;
    return OK;
}

#include "unused.h"
