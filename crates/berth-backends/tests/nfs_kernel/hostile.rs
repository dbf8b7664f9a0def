//! Calls by a driver whose mounts are the kernel's while the server is away, read-only or full.

use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::Path,
    time::{Duration, Instant},
};

use tonic::{Code, Status};

use crate::{
    caller::Caller,
    kernel::{self, EXPORT, Scratch, backend, serve},
    served::Served,
};

const DEADLINE: Duration = Duration::from_secs(20);
const SLACK: Duration = Duration::from_secs(5);
/// How long what is repeated may take to succeed; a server of version 4 may wait for its clients first.
const PATIENCE: Duration = Duration::from_secs(90);
/// How a pod that waits for its server is waited for.
const SOON: Duration = Duration::from_secs(120);

fn code<T>(result: &Result<T, Status>) -> Code {
    match result {
        Ok(_) => Code::Ok,
        // The client's own clock is sometimes the first.
        Err(status) if status.code() == Code::Cancelled => Code::DeadlineExceeded,
        Err(status) => status.code(),
    }
}

/// Repeats a call as an orchestrator does.
async fn until_done<T>(what: &str, call: impl AsyncFn() -> Result<T, Status>) {
    let begun = Instant::now();
    loop {
        let answer = call().await;
        match code(&answer) {
            Code::Ok => return,
            Code::Aborted | Code::Unavailable | Code::DeadlineExceeded => {}
            _ => panic!("{what} does not come right: {:?}", answer.err()),
        }
        assert!(begun.elapsed() < PATIENCE, "{what} does not succeed: {:?}", answer.err());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Threads of this process that wait where no signal reaches them.
fn stuck() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).unwrap_or_default();
    tasks.map(|task| status(task.unwrap())).filter(|status| status.contains("State:\tD")).collect()
}

struct World {
    scratch: Scratch,
    served: Served,
    caller: Caller,
    /// So that the volumes of one test are no other's.
    prefix: String,
}

impl World {
    async fn start(version: &str, test: &str) -> Self {
        serve();
        let scratch = Scratch::new();
        let served = Served::start(scratch.path(), backend(scratch.path()).await).await;
        let caller = Caller::new(&served.socket, version, DEADLINE);
        let world = Self { scratch, served, caller, prefix: format!("{test}-{}", version.replace('.', "-")) };
        for volume in ["used", "idle", "leaving"] {
            let name = world.name(volume);
            until_done("creating", || world.caller.create(&name)).await;
            fs::write(world.dir(volume).join("unread"), vec![b'u'; 1 << 20]).unwrap();
        }
        for volume in ["used", "leaving"] {
            until_done("publishing", || world.publish(volume)).await;
        }
        world
    }

    fn name(&self, volume: &str) -> String {
        format!("{}-{volume}", self.prefix)
    }

    /// On the server's disk.
    fn dir(&self, volume: &str) -> std::path::PathBuf {
        Path::new(EXPORT).join(self.name(volume))
    }

    fn target(&self, volume: &str) -> std::path::PathBuf {
        self.scratch.path().join(volume)
    }

    async fn publish(&self, volume: &str) -> Result<(), Status> {
        self.caller.publish(&self.name(volume), &self.target(volume)).await
    }

    async fn unpublish(&self, volume: &str) -> Result<(), Status> {
        self.caller.unpublish(&self.name(volume), &self.target(volume)).await
    }

    /// Takes everything away again, and looks whether it went.
    async fn end(self) {
        for volume in ["used", "idle", "leaving"] {
            until_done("unpublishing", || self.unpublish(volume)).await;
            let name = self.name(volume);
            until_done("deleting", || self.caller.delete(&name)).await;
        }
        assert!(self.scratch.mounts().is_empty(), "{:?}", self.scratch.mounts());
        assert_eq!(stuck(), Vec::<String>::new());
        assert_eq!(self.served.end().await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_keep_their_deadlines_while_the_server_is_away() {
    for version in ["3", "4.1"] {
        let world = World::start(version, "away").await;
        kernel::run("rpc.nfsd", &["0"]);
        let files = [world.target("used"), world.dir("used")].map(|dir| dir.join("unread"));
        // A pod that reads meanwhile waits, and reads on.
        let reading = tokio::task::spawn_blocking(move || {
            berth_host::exec::run("cmp", files.map(|file| file.to_str().unwrap().to_owned()), SOON)
        });
        let begun = Instant::now();
        let (used, new) = (world.name("used"), world.name("new"));
        let target = world.target("used");
        let (stats, health, published, unpublished, created) = tokio::join!(
            world.caller.stats(&used, &target),
            world.caller.health(&used),
            world.publish("idle"),
            world.unpublish("leaving"),
            world.caller.create(&new),
        );
        assert!(begun.elapsed() < DEADLINE + SLACK, "{:?}", begun.elapsed());
        assert_eq!(code(&stats), Code::Unavailable, "{stats:?}");
        assert!(health.as_ref().unwrap().contains(&"ServerUnreachable".to_owned()), "{health:?}");
        assert_eq!(code(&unpublished), Code::Ok, "a pod can always end: {unpublished:?}");
        for absent in [code(&published), code(&created)] {
            assert!(
                matches!(absent, Code::Unavailable | Code::DeadlineExceeded),
                "{published:?} {created:?}"
            );
        }
        let begun = Instant::now();
        let again = world.caller.stats(&used, &target).await;
        assert_eq!(code(&again), Code::Unavailable, "{again:?}");
        assert!(begun.elapsed() < Duration::from_secs(2), "it is known: {:?}", begun.elapsed());

        kernel::start_again();
        until_done("publishing", || world.publish("idle")).await;
        until_done("publishing", || world.publish("used")).await;
        until_done("creating", || world.caller.create(&new)).await;
        until_done("measuring", || world.caller.stats(&used, &target)).await;
        reading.await.unwrap().unwrap();
        assert_eq!(world.caller.health(&used).await.unwrap(), Vec::<String>::new());
        until_done("deleting", || world.caller.delete(&new)).await;
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_read_only_or_full_says_so() {
    for version in ["3", "4.2"] {
        let world = World::start(version, "refusing").await;
        let (used, new) = (world.name("used"), world.name("new"));
        kernel::export("ro");
        let refused = world.caller.create(&new).await;
        assert_eq!(code(&refused), Code::FailedPrecondition, "{refused:?}");
        let refused = world.caller.delete(&world.name("idle")).await;
        assert_eq!(code(&refused), Code::FailedPrecondition, "{refused:?}");
        assert_eq!(world.caller.health(&used).await.unwrap(), ["ReadOnly"]);
        until_done("publishing", || world.publish("idle")).await;
        assert_eq!(fs::read(world.target("idle").join("unread")).unwrap().len(), 1 << 20);
        assert!(fs::write(world.target("idle").join("new"), "x").is_err());
        kernel::export("rw");

        let filler = fs::File::create(Path::new(EXPORT).join("filler")).unwrap();
        let block = vec![b'f'; 1 << 20];
        let mut offset = 0;
        while let Ok(written @ 1..) = filler.write_at(&block, offset) {
            offset += written as u64;
        }
        let refused = world.caller.create(&new).await;
        assert_eq!(code(&refused), Code::ResourceExhausted, "{refused:?}");
        assert_eq!(world.caller.health(&used).await.unwrap(), ["ShareFull"]);
        until_done("unpublishing", || world.unpublish("leaving")).await;
        let leaving = world.name("leaving");
        until_done("deleting", || world.caller.delete(&leaving)).await;
        fs::remove_file(Path::new(EXPORT).join("filler")).unwrap();
        until_done("creating", || world.caller.create(&new)).await;
        until_done("deleting", || world.caller.delete(&new)).await;
        world.end().await;
    }
}
