//! Starts the generator: chooses the runtime, one pinned thread per core, the progress bar, and the merged result.

use std::cell::RefCell;
use std::io::IsTerminal;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::drive::{self, Pace, Plan};
use crate::report::{LagOf, Recorder, Report, RuntimeUsed};
use crate::{epoll_rt, glommio_rt};

/// Time between building the threads and the first request: runtimes are up by then.
const RUN_UP: Duration = Duration::from_millis(50);

/// How often the progress bar is drawn.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// Which runtime generates the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum RuntimeChoice {
    /// glommio, or the epoll runtime where glommio cannot start.
    #[default]
    Auto,
    /// The epoll runtime.
    Epoll,
}

impl RuntimeChoice {
    fn resolve(self) -> RuntimeUsed {
        match self {
            RuntimeChoice::Epoll => RuntimeUsed::Epoll { reason: "the epoll runtime was asked for".to_owned() },
            RuntimeChoice::Auto => match glommio_rt::probe() {
                Ok(()) => RuntimeUsed::Glommio,
                Err(reason) => RuntimeUsed::Epoll { reason },
            },
        }
    }
}

/// The generator's threads: one for each core; none = one thread that is not pinned.
pub(crate) type Cores = Vec<Option<usize>>;

/// Parses a core list (`0,2-3`) and checks that this process may use each.
///
/// # Errors
/// Anything but a list of numbers and ranges, and cores this process may not run on.
pub(crate) fn parse_cores(list: &str) -> anyhow::Result<Cores> {
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number =
            |text: &str| text.trim().parse::<usize>().with_context(|| format!("`{part}` is not a core or a range"));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last - first >= 4_096 {
            bail!("`{part}` is not a range of cores");
        }
        cores.extend(first..=last);
    }
    let allowed: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect();
    if let Some(core) = cores.iter().find(|core| !allowed.contains(core)) {
        bail!("core {core} is not among the cores this process may use: {allowed:?}");
    }
    cores.sort_unstable();
    cores.dedup();
    Ok(cores.into_iter().map(Some).collect())
}

/// One thread on the last core this process may use.
pub(crate) fn default_cores() -> Cores {
    vec![core_affinity::get_core_ids().and_then(|cores| cores.last().map(|core| core.id))]
}

/// Plays the plan on a thread per core and returns what all saw together.
pub(crate) fn play(
    mut plan: Plan,
    cores: Cores,
    choice: RuntimeChoice,
    pace_in_words: String,
) -> anyhow::Result<Report> {
    plan.threads = cores.len();
    let plan = Arc::new(plan);
    let runtime = choice.resolve();
    let start = Instant::now() + RUN_UP;
    let mut threads = Vec::new();
    for (number, &core) in cores.iter().enumerate() {
        threads.push(start_thread(Arc::clone(&plan), runtime == RuntimeUsed::Glommio, number, core, start)?);
    }
    draw_progress(&plan, &threads, start);
    let mut seen = Recorder::default();
    for thread in threads {
        let part =
            thread.join().map_err(|_| anyhow::anyhow!("a generator thread panicked: the run has no result"))??;
        seen.merge(&part);
    }
    let lag_of = match plan.pace {
        Pace::Closed { .. } => LagOf::Timer,
        Pace::Open { .. } => LagOf::Sends,
    };
    Ok(Report {
        target: format!("http://{}{}", plan.target.host, plan.target.prefix),
        workload: plan.workload.describe(),
        pace: pace_in_words,
        runtime,
        cores,
        elapsed: start.elapsed(),
        lag_of,
        seen,
    })
}

type Worker = JoinHandle<std::io::Result<Recorder>>;

fn start_thread(
    plan: Arc<Plan>,
    glommio: bool,
    number: usize,
    core: Option<usize>,
    start: Instant,
) -> std::io::Result<Worker> {
    std::thread::Builder::new().name(format!("loadgen-{number}")).spawn(move || {
        let seen = Rc::new(RefCell::new(Recorder::default()));
        if glommio {
            glommio_rt::run(core, drive::run::<glommio_rt::Glommio>(plan, number, start, Rc::clone(&seen)))?;
        } else {
            epoll_rt::run(core, drive::run::<epoll_rt::Epoll>(plan, number, start, Rc::clone(&seen)))?;
        }
        Ok(seen.take())
    })
}

/// Shows how far the run is until all threads have ended, on a terminal only.
fn draw_progress(plan: &Plan, threads: &[Worker], start: Instant) {
    if !std::io::stderr().is_terminal() {
        return;
    }
    let of_requests = plan.requests_max != usize::MAX;
    let length = if of_requests { plan.requests_max as u64 } else { plan.duration.as_millis() as u64 };
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % {msg}").expect("the template is a constant");
    let bar = ProgressBar::new(length).with_style(style);
    while threads.iter().any(|thread| !thread.is_finished()) {
        let ended = plan.progress.ended.load(Ordering::Relaxed);
        bar.set_position(if of_requests { ended } else { (start.elapsed().as_millis() as u64).min(length) });
        bar.set_message(format!("{ended} answers, {} errors", plan.progress.errors.load(Ordering::Relaxed)));
        std::thread::sleep(DRAW_EVERY);
    }
    bar.finish_and_clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_lists_are_checked_against_what_this_process_may_use() {
        let mine = core_affinity::get_core_ids().unwrap()[0].id;
        assert_eq!(parse_cores(&format!("{mine}-{mine},{mine}")).unwrap(), [Some(mine)]);
        for bad in ["", "x", "1-", "3-1", "0-99999", "4095"] {
            assert!(parse_cores(bad).is_err(), "`{bad}`");
        }
    }
}
