//! The driver over an API that remembers volumes as DigitalOcean's does, and fails when it is told to.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use berth_core::{Access, AccessMode, Capacity, CapacityRange, VolumeCapability};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{account::Account, api::Api, *};
use crate::{
    Attachment as _, CapacityInfo as _, Cloning as _, Context, Expansion as _, Listing as _, NewSnapshot,
    NewVolume, PageRequest, Parameters, Placement as _, Snapshots as _, TopologyRequirement, Volume,
    Volumes as _,
    cloud::{
        leftovers::remove_leftovers,
        scripted::{Asked, Reply, Scripted},
    },
};

const GIB: i64 = 1 << 30;
const TOKEN: &str = "hush-hush";

/// An account of the provider.
#[derive(Default)]
struct Cloud {
    volumes: BTreeMap<String, Value>,
    snapshots: BTreeMap<String, Value>,
    actions: BTreeMap<u64, Action>,
    next: u64,
    /// How often an action is asked for before it is done.
    looks: u32,
    /// What happens to the next requests whose line begins so.
    faults: Vec<(&'static str, Fault)>,
}

struct Action {
    volume: String,
    looks: u32,
    what: Value,
    fails: bool,
}

#[derive(Clone, PartialEq)]
enum Fault {
    Before(u16, &'static str),
    After(u16),
    Throttle,
    Errored,
    DropAfter,
}

impl Cloud {
    fn id(&mut self, kind: &str) -> String {
        self.next += 1;
        format!("{kind}-{:04}", self.next)
    }

    fn answer(&mut self, asked: &Asked) -> Reply {
        if asked.headers.get("authorization").is_none_or(|token| token != format!("Bearer {TOKEN}").as_str())
        {
            return complain(401, "unauthorized", "Unable to authenticate you");
        }
        let line = asked.line();
        let fault = self.faults.iter().position(|(begin, _)| line.starts_with(begin));
        let fault = fault.map(|at| self.faults.remove(at).1);
        match &fault {
            Some(Fault::Before(status, words)) => return complain(*status, "fault", words),
            Some(Fault::Throttle) => {
                let headers = vec![("retry-after", "0".to_owned())];
                return Reply::With(429, headers, json!({ "id": "too_many_requests", "message": "slow" }));
            }
            _ => {}
        }
        let reply = self.work(asked, fault == Some(Fault::Errored));
        match fault {
            Some(Fault::After(status)) => complain(status, "fault", "after the work"),
            Some(Fault::DropAfter) => Reply::Drop,
            _ => reply,
        }
    }

    fn work(&mut self, asked: &Asked, errored: bool) -> Reply {
        let (path, query) = asked.target.split_once('?').unwrap_or((&asked.target, ""));
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let argument =
            |key: &str| query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        match (asked.method.as_str(), &parts[1..]) {
            ("GET", ["account"]) => Reply::Json(200, json!({ "account": { "volume_limit": 10 } })),
            ("GET", ["volumes"]) => {
                let named = |volume: &&Value| argument("name").is_none_or(|name| volume["name"] == name);
                page("volumes", self.volumes.values().filter(named), argument("page"), argument("per_page"))
            }
            ("GET", ["snapshots"]) => {
                page("snapshots", self.snapshots.values(), argument("page"), argument("per_page"))
            }
            ("POST", ["volumes"]) => self.create(&asked.body),
            ("GET", ["volumes", id]) => one("volume", self.volumes.get(*id)),
            ("DELETE", ["volumes", id]) => {
                if self.volumes.get(*id).is_some_and(|volume| volume["droplet_ids"] != json!([])) {
                    return complain(409, "conflict", "attached volume cannot be deleted");
                }
                if self.volumes.remove(*id).is_some() { Reply::Json(204, Value::Null) } else { missing() }
            }
            ("POST", ["volumes", id, "actions"]) => self.act(id, &asked.body, errored),
            ("GET", ["volumes", _, "actions", action]) => self.poll_action(action.parse().unwrap()),
            ("POST", ["volumes", id, "snapshots"]) => self.snapshot(id, &asked.body),
            ("GET", ["snapshots", id]) => one("snapshot", self.snapshots.get(*id)),
            ("DELETE", ["snapshots", id]) => {
                if self.snapshots.remove(*id).is_some() {
                    Reply::Json(204, Value::Null)
                } else {
                    missing()
                }
            }
            ("GET", ["droplets", id]) if id.parse::<u64>().is_ok_and(|id| id < 100) => {
                Reply::Json(200, json!({ "droplet": self.droplet(id.parse().unwrap()) }))
            }
            ("GET", ["droplets"]) => {
                // Whoever lists them finds that everything is done.
                for action in self.actions.values_mut() {
                    action.looks = 0;
                }
                let under_way: Vec<u64> = self.actions.keys().copied().collect();
                for action in under_way {
                    self.poll_action(action);
                }
                let all: Vec<Value> = (1..8).map(|id| self.droplet(id)).collect();
                page("droplets", all.iter(), argument("page"), argument("per_page"))
            }
            _ => missing(),
        }
    }

    fn droplet(&self, id: u64) -> Value {
        let is_there = |(_, volume): &(&String, &Value)| volume["droplet_ids"] == json!([id]);
        let has: Vec<&String> = self.volumes.iter().filter(is_there).map(|(id, _)| id).collect();
        json!({ "id": id, "volume_ids": has, "region": { "slug": "nyc3" } })
    }

    fn create(&mut self, body: &Value) -> Reply {
        if self.volumes.values().any(|volume| volume["name"] == body["name"]) {
            return complain(409, "already_exists", "already exists");
        }
        if self.volumes.len() >= 10 {
            return complain(
                403,
                "forbidden",
                "failed to create volume: volume/snapshot capacity limit exceeded",
            );
        }
        let size = match body["snapshot_id"].as_str() {
            // The size that is asked for is ignored, as the provider does.
            Some(id) => self.snapshots[id]["min_disk_size"].clone(),
            None => body["size_gigabytes"].clone(),
        };
        let id = self.id("vol");
        let volume = json!({
            "id": id, "name": body["name"], "size_gigabytes": size, "description": body["description"],
            "droplet_ids": [], "tags": body["tags"], "region": { "slug": body["region"] },
            "created_at": "2026-01-01T00:00:00Z",
        });
        self.volumes.insert(id, volume.clone());
        Reply::Json(201, json!({ "volume": volume }))
    }

    fn act(&mut self, id: &str, body: &Value, fails: bool) -> Reply {
        let Some(volume) = self.volumes.get(id) else { return missing() };
        if body["type"] == "detach" && volume["droplet_ids"] != json!([body["droplet_id"]]) {
            return complain(422, "unprocessable_entity", "Attachment not found");
        }
        if body["type"] == "attach" && volume["droplet_ids"] != json!([]) {
            return complain(422, "unprocessable_entity", "This volume is already attached");
        }
        self.next += 1;
        let action = Action { volume: id.to_owned(), looks: self.looks, what: body.clone(), fails };
        self.actions.insert(self.next, action);
        let (number, is_now) = (self.next, self.looks == 0 && !fails);
        if is_now {
            return self.poll_action(number);
        }
        Reply::Json(202, json!({ "action": { "id": number, "status": "in-progress" } }))
    }

    fn poll_action(&mut self, number: u64) -> Reply {
        let action = self.actions.get_mut(&number).unwrap();
        if action.looks > 1 {
            action.looks -= 1;
            return Reply::Json(200, json!({ "action": { "id": number, "status": "in-progress" } }));
        }
        if action.fails {
            return Reply::Json(200, json!({ "action": { "id": number, "status": "errored" } }));
        }
        let volume = self.volumes.get_mut(&action.volume).unwrap();
        match action.what["type"].as_str().unwrap() {
            "attach" => volume["droplet_ids"] = json!([action.what["droplet_id"]]),
            "detach" => volume["droplet_ids"] = json!([]),
            _ => volume["size_gigabytes"] = action.what["size_gigabytes"].clone(),
        }
        Reply::Json(200, json!({ "action": { "id": number, "status": "completed" } }))
    }

    fn snapshot(&mut self, volume: &str, body: &Value) -> Reply {
        let Some(size) = self.volumes.get(volume).map(|volume| volume["size_gigabytes"].clone()) else {
            return missing();
        };
        let id = self.id("snap");
        let snapshot = json!({
            "id": id, "name": body["name"], "resource_id": volume, "resource_type": "volume",
            "min_disk_size": size, "size_gigabytes": 0.5, "regions": ["nyc3"], "created_at": "2026-01-01T00:00:00Z",
        });
        self.snapshots.insert(id, snapshot.clone());
        Reply::Json(201, json!({ "snapshot": snapshot }))
    }
}

fn complain(status: u16, id: &str, message: &str) -> Reply {
    Reply::Json(status, json!({ "id": id, "message": message, "request_id": "r-77" }))
}

fn missing() -> Reply {
    complain(404, "not_found", "The resource you requested could not be found.")
}

fn one(key: &str, found: Option<&Value>) -> Reply {
    found.map_or_else(missing, |found| Reply::Json(200, json!({ key: found })))
}

/// Pages of two, so that there are several.
fn page<'a>(
    key: &str,
    all: impl Iterator<Item = &'a Value>,
    number: Option<&str>,
    size: Option<&str>,
) -> Reply {
    let number: usize = number.map_or(1, |number| number.parse().unwrap());
    let size = size.map_or(20, |size| size.parse().unwrap()).min(2);
    let all: Vec<&Value> = all.collect();
    let entries: Vec<_> = all.iter().skip((number - 1) * size).take(size).collect();
    let links = if number * size < all.len() {
        json!({ "pages": { "next": format!("http://other/?page={}", number + 1) } })
    } else {
        json!({})
    };
    Reply::Json(200, json!({ key: entries, "links": links, "meta": { "total": all.len() } }))
}

/// A driver on such an account.
struct Bench {
    cloud: Arc<Mutex<Cloud>>,
    server: Scripted,
    account: Arc<Account>,
    ctx: Context,
}

fn config(url: &str, directory: &std::path::Path) -> Config {
    Config {
        driver_name: "dobs.csi.digitalocean.com".to_owned(),
        url: url.to_owned(),
        token: Some(Secret::new("token", TOKEN).unwrap()),
        rate: 0.0,
        region: Some("nyc3".to_owned()),
        node_id: Some("7".parse().unwrap()),
        metadata_url: "http://127.0.0.1:9".to_owned(),
        tag: None,
        volume_limit: 3,
        device_dir: directory.to_owned(),
        validate_attachment: false,
        state_dir: directory.to_owned(),
        leftover_age: Duration::from_secs(1 << 40),
    }
}

impl Bench {
    async fn new() -> Self {
        let cloud: Arc<Mutex<Cloud>> = Arc::default();
        let answering = cloud.clone();
        let server = Scripted::serve(move |asked| answering.lock().answer(asked)).await;
        let account = Self::open(&server).await;
        server.take_lines();
        Self { cloud, server, account, ctx: Context::default() }
    }

    async fn open(server: &Scripted) -> Arc<Account> {
        let config = config(&server.url, std::path::Path::new("/nowhere"));
        let endpoint = Endpoint::parse("--url", &config.url, &[]).unwrap();
        let api = Api::new(endpoint, config.token.clone().unwrap(), 0.0).unwrap();
        let account = Account::open(api, "nyc3", &config).await.unwrap();
        // The first look for what was left over is made before anything is counted.
        while !server.asked().iter().any(|asked| asked.target.contains("snapshots")) {
            tokio::task::yield_now().await;
        }
        account
    }

    fn fault(&self, begin: &'static str, fault: Fault) {
        self.cloud.lock().faults.push((begin, fault));
    }

    async fn create(&self, name: &str, size: i64) -> crate::Result<Volume> {
        let plan = self.account.plan(&self.ctx, &new(name, size, 0))?;
        if let Some(found) = self.account.find(&self.ctx, &plan).await? {
            return Ok(found);
        }
        self.account.create(&self.ctx, plan).await
    }

    async fn clone_of(&self, name: &str, size: i64, source: &Volume) -> crate::Result<Volume> {
        let plan = self.account.plan(&self.ctx, &new(name, size, 0))?;
        if let Some(found) = self.account.find(&self.ctx, &plan).await? {
            return Ok(found);
        }
        self.account.clone_volume(&self.ctx, plan, source).await
    }

    async fn attach(&self, volume: &Volume, node: &str) -> crate::Result<BTreeMap<String, String>> {
        let volume = self.account.get(&self.ctx, &volume.id).await.unwrap().unwrap();
        let node = node.parse().unwrap();
        self.account.attach(&self.ctx, &volume, &node, &capability()).await
    }

    fn counts(&self) -> (usize, usize) {
        let cloud = self.cloud.lock();
        (cloud.volumes.len(), cloud.snapshots.len())
    }
}

fn capability() -> VolumeCapability {
    let access = Access::Mount { fs_type: String::new(), flags: vec![], group: None };
    VolumeCapability { access, mode: AccessMode::SingleNodeWriter }
}

fn new(name: &str, required: i64, limit: i64) -> NewVolume {
    NewVolume {
        name: name.parse().unwrap(),
        range: CapacityRange::new(required, limit).unwrap(),
        capabilities: vec![capability()],
        parameters: Parameters::new(),
        mutable: Parameters::new(),
        ephemeral: false,
    }
}

#[tokio::test]
async fn a_volume_of_one_and_a_half_gib_gets_two_and_is_found_again() {
    let bench = Bench::new().await;
    let made = bench.create("pvc-1", 3 * GIB / 2).await.unwrap();
    assert_eq!(made.capacity, Capacity::gibibytes(2));
    let again = bench.create("pvc-1", 3 * GIB / 2).await.unwrap();
    assert_eq!((again.id, bench.counts()), (made.id.clone(), (1, 0)));
    let expanded = bench.account.expand(&bench.ctx, &made, CapacityRange::new(5 * GIB / 2, 0).unwrap()).await;
    assert_eq!(expanded.unwrap().capacity, Capacity::gibibytes(3));
    for (required, limit) in [(17 << 40, 0), (3 * GIB / 2, 3 * GIB / 2)] {
        let refused = bench.account.plan(&bench.ctx, &new("x", required, limit)).unwrap_err();
        assert!(matches!(refused, Error::OutOfRange(_)), "{refused}");
    }
    bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    assert_eq!(bench.counts(), (0, 0));
}

#[tokio::test]
async fn a_parameter_that_is_not_known_is_refused_by_its_name() {
    let bench = Bench::new().await;
    let mut unknown = new("pvc-1", GIB, 0);
    unknown.parameters.insert("iops".to_owned(), "9".to_owned());
    let refused = bench.account.plan(&bench.ctx, &unknown).unwrap_err();
    assert_eq!(refused.to_string(), "parameter \"iops\" is not known; known are none");
    assert_eq!(bench.server.take_lines(), [""; 0]);
}

#[tokio::test]
async fn a_server_that_fails_after_the_work_makes_no_second_volume_or_snapshot() {
    let bench = Bench::new().await;
    for (name, fault) in
        [("a", Fault::After(500)), ("b", Fault::After(503)), ("c", Fault::DropAfter), ("d", Fault::Throttle)]
    {
        bench.fault("POST /v2/volumes", fault);
        bench.create(name, GIB).await.unwrap();
    }
    assert_eq!(bench.counts(), (4, 0));
    let source = bench.create("a", GIB).await.unwrap();
    bench.fault("POST /v2/volumes", Fault::After(502));
    let wanted =
        NewSnapshot { name: "s".parse().unwrap(), source: source.id.clone(), parameters: Parameters::new() };
    let taken = bench.account.take_snapshot(&bench.ctx, wanted.clone(), &source).await.unwrap();
    let found = bench.account.find_snapshot(&bench.ctx, &wanted).await.unwrap().unwrap();
    assert_eq!((taken.id, taken.ready, bench.counts()), (found.id, true, (4, 1)));
    // Nothing was done, and nothing is claimed.
    bench.fault("POST /v2/volumes", Fault::Before(500, "down"));
    let error = bench.create("e", GIB).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(_)), "{error}");
    assert!(error.to_string().contains("request r-77"), "{error}");
    assert_eq!(bench.counts(), (4, 1));
    // A read is simply repeated.
    bench.fault("GET /v2/volumes/", Fault::Before(502, "down"));
    assert!(bench.account.get(&bench.ctx, &source.id).await.unwrap().is_some());
}

#[tokio::test]
async fn an_action_that_fails_is_an_error_at_once_and_one_that_takes_time_is_waited_for() {
    let bench = Bench::new().await;
    bench.cloud.lock().looks = 3;
    let volume = bench.create("pvc-1", GIB).await.unwrap();
    let told = bench.attach(&volume, "7").await.unwrap();
    assert_eq!(told["dobs.csi.digitalocean.com/volume-name"], "pvc-1");
    assert_eq!(bench.attach(&volume, "7").await.unwrap(), told);
    let error = bench.attach(&volume, "8").await.unwrap_err();
    assert!(matches!(&error, Error::Precondition(said) if said.contains("\"7\"")), "{error}");
    let (node, other) = ("7".parse().unwrap(), "9".parse().unwrap());
    bench.account.detach(&bench.ctx, &volume.id, Some(&other)).await.unwrap();
    assert_eq!(bench.account.get(&bench.ctx, &volume.id).await.unwrap().unwrap().attachments.len(), 1);
    let error = bench.account.delete(&bench.ctx, &volume.id).await.unwrap_err();
    assert!(matches!(error, Error::Precondition(_)), "{error}");
    bench.account.detach(&bench.ctx, &volume.id, Some(&node)).await.unwrap();
    bench.account.detach(&bench.ctx, &volume.id, None).await.unwrap();
    let start = std::time::Instant::now();
    bench.fault("POST /v2/volumes/", Fault::Errored);
    let error = bench.attach(&volume, "7").await.unwrap_err();
    assert!(error.to_string().contains("errored") && start.elapsed() < Duration::from_secs(20), "{error}");
}

#[tokio::test]
async fn a_droplet_that_is_full_unknown_or_busy_is_told_apart() {
    let bench = Bench::new().await;
    let mut volumes = Vec::new();
    for name in ["a", "b", "c", "d"] {
        volumes.push(bench.create(name, GIB).await.unwrap());
    }
    // Something else is done to the droplet: it is asked again.
    bench.fault("POST /v2/volumes/", Fault::Before(422, "Droplet already has a pending event."));
    for volume in &volumes[..3] {
        bench.attach(volume, "7").await.unwrap();
    }
    let error = bench.attach(&volumes[3], "7").await.unwrap_err();
    assert!(matches!(&error, Error::Exhausted(said) if said.contains("no more than 3")), "{error}");
    for unknown in ["700", "fake-node"] {
        let error = bench.attach(&volumes[3], unknown).await.unwrap_err();
        assert!(matches!(&error, Error::NotFound { what: "node", .. }), "{error}");
    }
    bench.fault("POST /v2/volumes/", Fault::Before(422, "cannot attach more volumes to the Droplet"));
    assert!(matches!(bench.attach(&volumes[3], "8").await, Err(Error::Exhausted(_))));
    // The answer is lost, the attachment is not.
    bench.fault("POST /v2/volumes/", Fault::After(504));
    bench.attach(&volumes[3], "8").await.unwrap();
    let listed = bench.account.list(&bench.ctx, &PageRequest { after: None, limit: 3 }).await.unwrap();
    let nodes: Vec<_> = listed.entries.iter().map(|volume| volume.attachments[0].node.to_string()).collect();
    assert_eq!((nodes, listed.next.is_some()), (vec!["7".to_owned(); 3], true));
    let rest = bench.account.list(&bench.ctx, &PageRequest { after: listed.next, limit: 3 }).await.unwrap();
    assert_eq!((rest.entries.len(), rest.next), (1, None));
}

#[tokio::test]
async fn a_clone_is_a_snapshot_and_a_volume_of_it_and_nothing_is_left_whatever_breaks() {
    let bench = Bench::new().await;
    let source = bench.create("source", 2 * GIB).await.unwrap();
    let clone = bench.clone_of("clone", 5 * GIB, &source).await.unwrap();
    assert_eq!(clone.capacity, Capacity::gibibytes(5));
    assert_eq!(clone.source, Some(crate::ContentSource::Volume(source.id.clone())));
    assert_eq!(bench.counts(), (2, 0));
    // Cut off after each request in turn; the call is made again until it succeeds.
    for (number, begin) in
        ["POST /v2/volumes/", "POST /v2/volumes", "DELETE /v2/snapshots"].into_iter().enumerate()
    {
        let name = format!("clone-{number}");
        bench.fault(begin, Fault::Before(500, "down"));
        bench.fault(begin, Fault::Before(500, "down"));
        let mut made = bench.clone_of(&name, 5 * GIB, &source).await;
        for _ in 0..4 {
            if made.is_err() {
                made = bench.clone_of(&name, 5 * GIB, &source).await;
            }
        }
        let made = made.unwrap();
        assert_eq!(made.capacity, Capacity::gibibytes(5));
        bench.cloud.lock().faults.clear();
        assert_eq!(bench.counts().1, 0, "{begin}");
        bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    }
    // A driver that was killed in between: the volume is there with the size of its source, and so is the snapshot.
    let soon = || Deadline::after(Duration::from_secs(30));
    let left = bench.account.snapshot_now(source.id.as_str(), "berth-clone-left", &[], soon()).await.unwrap();
    let (by, of) = (left.id.clone(), source.id.to_string());
    let description =
        names::Origin { from: names::From::Volume { id: of, by: by.clone() }, size: 5 }.describe();
    bench
        .cloud
        .lock()
        .create(&json!({ "name": "late", "description": description, "snapshot_id": by, "region": "nyc3" }));
    assert_eq!(bench.counts(), (3, 1));
    let late = bench.create("late", 5 * GIB).await.unwrap();
    assert_eq!((late.capacity, bench.counts()), (Capacity::gibibytes(5), (3, 0)));
    // And one that was killed before there was a volume.
    bench.account.snapshot_now(source.id.as_str(), "berth-clone-left", &[], soon()).await.unwrap();
    let listed =
        bench.account.list_snapshots(&bench.ctx, None, &PageRequest { after: None, limit: 9 }).await.unwrap();
    assert!(listed.entries.is_empty(), "snapshots of clones belong to nobody");
    remove_leftovers(bench.account.as_ref(), Duration::from_secs(60)).await.unwrap();
    assert_eq!(bench.counts(), (3, 0));
}

#[tokio::test]
async fn a_restored_volume_has_the_size_that_is_asked_for_and_knows_its_snapshot() {
    let bench = Bench::new().await;
    let source = bench.create("source", 2 * GIB).await.unwrap();
    let wanted = NewSnapshot {
        name: "snap".parse().unwrap(),
        source: source.id.clone(),
        parameters: Parameters::new(),
    };
    let taken = bench.account.take_snapshot(&bench.ctx, wanted, &source).await.unwrap();
    assert_eq!((taken.size, taken.source.clone()), (Capacity::gibibytes(2), source.id.clone()));
    let plan = |name, size| bench.account.plan(&bench.ctx, &new(name, size, 0)).unwrap();
    let larger = bench.account.restore(&bench.ctx, plan("larger", 4 * GIB), &taken).await.unwrap();
    assert_eq!(larger.capacity, Capacity::gibibytes(4));
    let found = bench.account.find(&bench.ctx, &plan("larger", 4 * GIB)).await.unwrap().unwrap();
    assert_eq!(found.source, Some(crate::ContentSource::Snapshot(taken.id.clone())));
    let smaller = bench.account.restore(&bench.ctx, plan("smaller", GIB), &taken).await.unwrap();
    assert_eq!(smaller.capacity, Capacity::gibibytes(2));
    bench.account.delete_snapshot(&bench.ctx, &taken.id).await.unwrap();
    assert!(bench.account.snapshot(&bench.ctx, &taken.id).await.unwrap().is_none());
}

#[tokio::test]
async fn capacity_is_what_the_account_may_still_have_and_its_end_is_resource_exhausted() {
    let bench = Bench::new().await;
    let ask = async |topology: Option<Topology>| {
        bench
            .account
            .available_capacity(&bench.ctx, &Parameters::new(), topology.as_ref())
            .await
            .unwrap()
            .available
    };
    let largest = 16384 * (1u64 << 30);
    assert_eq!(ask(Some(Topology::single(REGION, "nyc3"))).await, Capacity::new(10 * largest));
    assert_eq!(ask(Some(Topology::single(REGION, "ams3"))).await, Capacity::ZERO);
    for number in 0..10 {
        bench.create(&format!("v{number}"), GIB).await.unwrap();
    }
    assert_eq!(ask(None).await, Capacity::ZERO);
    let error = bench.create("one-more", GIB).await.unwrap_err();
    assert!(matches!(error, Error::Exhausted(_)), "{error}");
    let mut plan = bench.account.plan(&bench.ctx, &new("x", GIB, 0)).unwrap();
    let elsewhere =
        TopologyRequirement { requisite: vec![Topology::single(REGION, "ams3")], preferred: vec![] };
    let error = bench.account.place(&bench.ctx, &mut plan, Some(&elsewhere)).await.unwrap_err();
    assert!(matches!(error, Error::Exhausted(_)), "{error}");
}

#[tokio::test]
async fn many_lookups_cost_few_requests() {
    let bench = Bench::new().await;
    let mut volumes = Vec::new();
    for number in 0..8 {
        volumes.push(bench.create(&format!("v{number}"), GIB).await.unwrap().id);
    }
    bench.server.take_lines();
    let all =
        futures_util::future::join_all(volumes.iter().map(|id| bench.account.get(&bench.ctx, id))).await;
    assert!(all.iter().all(|found| found.as_ref().unwrap().is_some()));
    // The pages of one listing for all.
    let asked = bench.server.take_lines().len();
    assert!(asked <= 5, "{asked} requests for 8 volumes");
}

#[tokio::test]
async fn many_who_wait_for_attachments_look_at_the_droplets_together() {
    let bench = Bench::new().await;
    let mut volumes = Vec::new();
    for number in 1..7 {
        volumes.push((number, bench.create(&format!("v{number}"), GIB).await.unwrap()));
    }
    bench.cloud.lock().looks = 1000;
    bench.server.take_lines();
    let attached =
        volumes.iter().map(async |(number, volume)| bench.attach(volume, &number.to_string()).await);
    let attached = futures_util::future::join_all(attached).await;
    assert!(attached.iter().all(Result::is_ok), "{attached:?}");
    let asked = bench.server.take_lines();
    let of = |begin: &str, end: &str| {
        asked.iter().filter(|line| line.starts_with(begin) && line.contains(end)).count()
    };
    assert_eq!(of("POST", "/actions"), 6, "{asked:#?}");
    // The last ones, who wait with few others, ask for their actions.
    assert!(of("GET", "/actions") <= 3, "{asked:#?}");
    // The limit of volumes here is smaller than the provider's, so droplets are asked for before as well: four pages each.
    assert!(of("GET", "/droplets") <= 12, "{asked:#?}");
    assert!(bench.account.durations.usual("attach").is_some());
}

#[tokio::test]
async fn the_token_is_in_no_error_and_a_wrong_one_ends_the_start() {
    let server = Scripted::serve(|asked| {
        assert_eq!(asked.headers["authorization"], "Bearer hush-hush");
        complain(401, "unauthorized", "Unable to authenticate you")
    })
    .await;
    let config = config(&server.url, std::path::Path::new("/nowhere"));
    assert!(!format!("{config:?}").contains("hush"));
    let error = DigitalOcean::open(config.clone(), Mode::Controller).await.unwrap_err().to_string();
    assert!(error.contains("token is not accepted") && !error.contains("hush"), "{error}");
    let plain = Config { url: "http://api.digitalocean.com/".to_owned(), ..config.clone() };
    let error = DigitalOcean::open(plain, Mode::Controller).await.unwrap_err().to_string();
    assert!(error.contains("loopback"), "{error}");
    let none = Config { token: None, ..config };
    let error = DigitalOcean::open(none, Mode::Controller).await.unwrap_err().to_string();
    assert!(error.contains("--token"), "{error}");
    for wrong in ["", " ", "a b", "a\nb", "träger"] {
        assert!(Secret::new("token", wrong).is_err(), "{wrong:?}");
    }
}
