//! CPU time of processes, and cores.

use std::io;

/// CPU time of a process, its threads and its children, ns, and that of each thread by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    pub total_ns: u64,
    pub threads: Vec<(String, u64)>,
}

/// User and system time so far, from the scheduler's own count, which has a finer step than `utime` and `stime`.
pub fn time_of(process: u32) -> io::Result<CpuTime> {
    let mut time = CpuTime::default();
    add(process, &mut time)?;
    Ok(time)
}

fn add(process: u32, time: &mut CpuTime) -> io::Result<()> {
    for entry in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let path = entry?.path();
        let read = |name: &str| std::fs::read_to_string(path.join(name));
        // A thread may end between the listing and the reading.
        let (Ok(name), Ok(stat)) = (read("comm"), read("schedstat")) else { continue };
        let on_cpu = stat.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok());
        let on_cpu = on_cpu.ok_or_else(|| io::Error::other("/proc/…/schedstat has another form"))?;
        time.total_ns += on_cpu;
        time.threads.push((name.trim().to_owned(), on_cpu));
        for child in read("children").unwrap_or_default().split_whitespace().filter_map(|id| id.parse().ok()) {
            add(child, time)?;
        }
    }
    Ok(())
}

/// Pins the calling thread (of a child between fork and exec: the process) to a core.
pub fn pin(core: usize) -> io::Result<()> {
    // SAFETY: `set` is a plain bit set for which all zeros is the empty set; CPU_SET and sched_setaffinity only read
    // and write it within its size, and core numbers beyond it are refused before.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if core >= libc::CPU_SETSIZE as usize {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        libc::CPU_SET(core, &mut set);
        if libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

/// Stops or continues a process and its children, so that an idle proxy costs the others nothing.
pub fn signal(process: u32, signal: libc::c_int) {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    for id in children.split_whitespace().filter_map(|id| id.parse().ok()).chain([process]) {
        // SAFETY: sends a signal to processes this one started; no memory is involved.
        unsafe { libc::kill(id as libc::pid_t, signal) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_shows_in_the_time_of_the_process() {
        let process = std::process::id();
        let before = time_of(process).unwrap();
        let worker = std::thread::spawn(move || {
            let start = std::time::Instant::now();
            let mut sum = 0u64;
            while start.elapsed().as_millis() < 30 {
                sum = std::hint::black_box(sum + 1);
            }
            time_of(process).unwrap()
        });
        let after = worker.join().unwrap();
        assert!(after.total_ns > before.total_ns);
        assert!(after.threads.len() >= 2);
    }

    #[test]
    fn impossible_cores_are_refused() {
        assert!(pin(libc::CPU_SETSIZE as usize).is_err());
    }
}
