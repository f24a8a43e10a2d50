// What a test tells the fake libibverbs, and asks it; world.py calls it through ctypes.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// A machine of that many NICs, fake0 and so on, with one port each that is active, RoCE v2 and v1
// addresses, and no memory of an earlier one. What is alive stays so.
void fake_reset(int num_devices);

// Fields by name, as in ibv_device_attr and ibv_port_attr; 0 if there is none of that name. Of a
// device also is_gone, and bytes_per_s: what is posted from now on is done after that time (0: at
// once).
int fake_set_device(int device, const char* field, uint64_t value);
int fake_set_port(int device, int port, const char* field, uint64_t value);
void fake_add_port(int device);
void fake_set_gid(int device, int port, int index, const uint8_t* gid, int type, int interface);
// keep_entries: of a queue pair that is destroyed, in its completion queue (1).
// corrupt: the first byte of what is moved (0). peermem: GPU memory can be pinned (0).
// max_pinned_bytes: ENOMEM beyond (none). stalled: NICs, a bit each, that do no work and say
// nothing of it (0).
void fake_set_option(const char* name, int64_t value);

void fake_add_rule(const char* verb, const char* device, int skip, int count, int error,
                   int delay_us, int meet);
void fake_clear_rules();
// The work request after the next `skip` ends with that ibv_wc_status.
void fake_fail_work(int skip, int status);
// Lets no more than that many work requests run from now on; -1: as many as there are.
void fake_set_budget(int64_t num_work);
void fake_inject_event(const char* device, int type, int port, uint32_t qp_num);

int64_t fake_count_live(const char* kind);
void fake_forget(const char* kind);              // no one will give these back
int64_t fake_count_entries(const char* device);  // in its completion queues
int64_t fake_count_calls(const char* verb);      // in all processes
void fake_clear_calls();
// Lines of text; returns how many bytes there are, whatever the size of `text`. Errors that fit
// into it are forgotten.
size_t fake_read_log(char* text, size_t size);
size_t fake_read_errors(char* text, size_t size);

}  // extern "C"
