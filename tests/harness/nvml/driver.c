/* A stand-in for NVIDIA's driver library, for machines without a GPU: the functions of nvml.h that the package asks for,
 * with the signatures that pynvml.py has of them.
 *
 * It does what a file says (the path is in TEST_NVML), which is read anew at each call: lines of "INDEX NAME VALUE", of
 * which the latest counts, "INDEX xid NUMBER" is an event, given once and in order, and "driver RESULT" is what
 * nvmlInit returns.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { MOST = 16, NONE = -1 };

typedef struct { int index; } Device;
typedef struct { Device *device; unsigned long long type, data; unsigned gpu, compute; } Event;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    union { double d; unsigned ui; unsigned long ul; unsigned long long ull; } value;
} Field;

static Device devices[MOST];
static int given; /* events so far */

/* The latest value of a name; with `nth`, the value of its line of that number instead, and in `index` whose it is. */
static long long said(int *index, const char *name, int nth) {
    const char *path = getenv("TEST_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char word[32];
    long long value, found = NONE;
    int whose, seen = 0;
    while (file && fscanf(file, "%d %31s %lld\n", &whose, word, &value) == 3)
        if (!strcmp(word, name) && (nth != NONE ? seen++ == nth : whose == *index)) {
            found = value;
            *index = whose;
        }
    if (file) fclose(file);
    return found;
}

static int of(Device *device, const char *name, long long *value) {
    int index = device ? device->index : NONE;
    if (said(&index, "lost", NONE) > 0) return GPU_IS_LOST;
    *value = said(&index, name, NONE);
    return *value == NONE ? NOT_SUPPORTED : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    int all = -1;
    long long result = said(&all, "driver", NONE);
    given = 0;
    return result == NONE ? SUCCESS : (int)result;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int result) { return result == GPU_IS_LOST ? "GPU is lost" : "an error of the stand-in"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int all = -1;
    long long value = said(&all, "gpus", NONE);
    *count = value == NONE ? 0 : (unsigned)value;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= MOST) return INVALID_ARGUMENT;
    devices[index].index = (int)index;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%d0000000-aaaa-bbbb-cccc-000000000000", device->index);
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) {
    *set = &given;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) { return SUCCESS; }

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, void *set) {
    return set == &given ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    int index = NONE;
    long long xid = said(&index, "xid", given);
    if (xid == NONE) return TIMEOUT;
    given++;
    memset(event, 0, sizeof *event);
    event->device = index == NONE ? NULL : &devices[index];
    event->type = 8; /* nvmlEventTypeXidCriticalError */
    event->data = (unsigned long long)xid;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *found) {
    long long value;
    int result = of(device, "busy", &value);
    if (result == SUCCESS) found->gpu = (unsigned)value;
    return result;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *found) {
    long long used, total;
    int result = of(device, "used", &used);
    if (result == SUCCESS) result = of(device, "total", &total);
    if (result == SUCCESS) *found = (Memory){(unsigned long long)total, (unsigned long long)(total - used), (unsigned long long)used};
    return result;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *found) {
    long long value;
    int result = of(device, "degrees", &value);
    if (result == SUCCESS) *found = (unsigned)value;
    return result;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *found) {
    long long value;
    int result = of(device, "reasons", &value);
    if (result == SUCCESS) *found = (unsigned long long)value;
    return result;
}

int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    for (int at = 0; at < count; at++) {
        char name[32];
        long long value;
        snprintf(name, sizeof name, "field-%u", fields[at].field);
        fields[at].result = of(device, name, &value);
        if (fields[at].result == GPU_IS_LOST) return GPU_IS_LOST;
        if (fields[at].result == SUCCESS) fields[at].value.ull = (unsigned long long)value;
    }
    return SUCCESS;
}
