//! The figures, beside what they should be.

use std::time::Duration;

const MB: f64 = 1e6;

/// What was measured of one server; rates are per second, memory in bytes.
#[derive(Debug, Default, Clone)]
pub(crate) struct Figures {
    pub(crate) ready: Duration,
    pub(crate) creates: [f64; 2],
    pub(crate) patches: [f64; 2],
    pub(crate) list: Duration,
    pub(crate) fan_out: f64,
    pub(crate) resident_idle: u64,
    pub(crate) resident: u64,
    pub(crate) etcd_idle: u64,
    pub(crate) etcd: u64,
}

/// What was measured of a store with many claims and volumes.
#[derive(Debug, Default, Clone)]
pub(crate) struct Many {
    pub(crate) objects: usize,
    pub(crate) listed: usize,
    pub(crate) rate: f64,
    pub(crate) filled: u64,
    pub(crate) restart: Duration,
    pub(crate) restarted: u64,
}

/// All measurements of one run; `kube` is `None` where no kube-apiserver was measured.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) berth: Figures,
    pub(crate) kube: Option<Figures>,
    pub(crate) many: Many,
}

fn megabytes(bytes: u64) -> f64 {
    // Exact to the byte up to petabytes.
    #[expect(clippy::cast_precision_loss, reason = "a few hundred megabytes")]
    let bytes = bytes as f64;
    bytes / MB
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

impl Table {
    /// One line: both figures and their ratio, which the target bounds.
    fn row(&self, what: &str, unit: &str, target: &str, figure: impl Fn(&Figures) -> f64, is_rate: bool) {
        let ours = figure(&self.berth);
        let (theirs, ratio) = self.kube.as_ref().map_or((String::new(), String::new()), |kube| {
            let theirs = figure(kube);
            let ratio = if is_rate { ours / theirs } else { theirs / ours };
            (format!("{theirs:.0}"), format!("{ratio:.1}x"))
        });
        println!("{what:<38} {ours:>10.0} {theirs:>10} {ratio:>8}  {unit:<9} {target}");
    }

    /// Prints one row for each measurement, with the target beside it.
    pub(crate) fn print(&self) {
        println!("{:<38} {:>10} {:>10} {:>8}", "over TLS, HTTP/1.1, durable", "berth", "kube+etcd", "better");
        self.row("ready after exec", "ms", "<= 200 ms", |it| milliseconds(it.ready), false);
        self.row("claims created, 1 client", "/s", ">= 5x", |it| it.creates[0], true);
        self.row("claims created, 32 clients", "/s", ">= 5x", |it| it.creates[1], true);
        self.row("statuses patched, 1 client", "/s", ">= 5x", |it| it.patches[0], true);
        self.row("statuses patched, 32 clients", "/s", ">= 5x", |it| it.patches[1], true);
        self.row("5,000 claims listed", "ms", ">= 5x", |it| milliseconds(it.list), false);
        self.row("events to 100 watchers", "/s", ">= 5x", |it| it.fan_out, true);
        let sum = |it: &Figures| megabytes(it.resident + it.etcd);
        let idle = |it: &Figures| megabytes(it.resident_idle + it.etcd_idle);
        self.row("resident when ready (with etcd)", "MB", ">= 10x", idle, false);
        self.row("resident after the load (with etcd)", "MB", ">= 10x", sum, false);
        if let Some(kube) = &self.kube {
            println!(
                "of which etcd: {:.0} MB, then {:.0} MB",
                megabytes(kube.etcd_idle),
                megabytes(kube.etcd)
            );
        }
        let many = &self.many;
        println!("{} claims and as many volumes, created at {:.0}/s:", many.objects, many.rate);
        println!("{:<38} {:>10.0} {:>29} <= 500 MB", "resident, filled", megabytes(many.filled), "MB");
        println!("{:<38} {:>10.0} {:>29} <= 500 MB", "resident, restarted", megabytes(many.restarted), "MB");
        println!("{:<38} {:>10.0} {:>29} <= 5000 ms", "restart", milliseconds(many.restart), "ms");
        println!("{} claims were listed after the restart", many.listed);
    }
}
