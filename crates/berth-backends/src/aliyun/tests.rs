//! The driver over an API that remembers disks as ECS does, and fails when it is told to.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use berth_core::{Access, AccessMode, Capacity, CapacityRange, VolumeCapability};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{account::Account, api::Api, *};
use crate::{
    Attachment as _, CapacityInfo as _, Cloning as _, ContentSource, Context, Expansion as _, Listing as _,
    Modification as _, NewSnapshot, NewVolume, PageRequest, Parameters, Placement as _, Snapshots as _,
    TopologyRequirement, Volume, Volumes as _,
    cloud::scripted::{Asked, Reply, Scripted},
};

const GIB: i64 = 1 << 30;

/// An account of the provider.
#[derive(Default)]
struct Cloud {
    disks: BTreeMap<String, Value>,
    snapshots: BTreeMap<String, Value>,
    /// What was asked for with a token, and what was made.
    tokens: BTreeMap<String, (BTreeMap<String, String>, String)>,
    /// Tasks that change disks: how often each is still described as under way, and how it ends.
    tasks: BTreeMap<String, (u32, &'static str)>,
    next: u64,
    /// How often something is described before it is done.
    looks: u32,
    /// How often a new disk is missing from descriptions.
    lag: u32,
    /// What happens to the next requests of an action.
    faults: Vec<(&'static str, Fault)>,
}

#[derive(Clone, PartialEq)]
enum Fault {
    Before(u16, &'static str),
    After(u16),
    DropAfter,
    Errored,
}

type Given = BTreeMap<String, String>;

fn complain(status: u16, code: &str) -> Reply {
    Reply::Json(status, json!({ "Code": code, "Message": "no", "RequestId": "R-77" }))
}

fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut decoded, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        if bytes[at] == b'%' {
            decoded.push(u8::from_str_radix(&text[at + 1..at + 3], 16).unwrap());
            at += 3;
        } else {
            decoded.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(decoded).unwrap()
}

impl Cloud {
    fn answer(&mut self, asked: &Asked) -> Reply {
        let action = asked.headers["x-acs-action"].to_str().unwrap().to_owned();
        let query = asked.target.strip_prefix("/?").unwrap();
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let given: Given = pairs.map(|(name, value)| (decode(name), decode(value))).collect();
        assert_eq!(given["RegionId"], "cn-hangzhou");
        let fault = self.faults.iter().position(|(of, _)| *of == action);
        let fault = fault.map(|at| self.faults.remove(at).1);
        if let Some(Fault::Before(status, code)) = &fault {
            return complain(*status, code);
        }
        let reply = self.work(&action, &given, fault == Some(Fault::Errored));
        match fault {
            Some(Fault::After(status)) => complain(status, "InternalError"),
            Some(Fault::DropAfter) => Reply::Drop,
            _ => reply,
        }
    }

    fn id(&mut self, kind: &str) -> String {
        self.next += 1;
        format!("{kind}-{:04}", self.next)
    }

    fn work(&mut self, action: &str, given: &Given, errored: bool) -> Reply {
        let get = |name: &str| given.get(name).map(String::as_str).unwrap_or_default();
        match action {
            "CreateDisk" | "CreateSnapshot" => self.create(action, given),
            "DescribeDisks" => self.describe("DiskIds", given),
            "DescribeSnapshots" => self.describe("SnapshotIds", given),
            "DeleteDisk" => match self.disks.get(get("DiskId")) {
                None => complain(404, "InvalidDiskId.NotFound"),
                Some(disk) if disk["Status"] != "Available" => complain(403, "IncorrectDiskStatus"),
                Some(_) => {
                    self.disks.remove(get("DiskId"));
                    Reply::Json(200, json!({}))
                }
            },
            "DeleteSnapshot" => match self.snapshots.remove(get("SnapshotId")) {
                None => complain(404, "InvalidSnapshotId.NotFound"),
                Some(_) => Reply::Json(200, json!({})),
            },
            "AttachDisk" | "DetachDisk" => self.move_disk(action, get("DiskId"), get("InstanceId"), errored),
            "ResizeDisk" => match self.disks.get_mut(get("DiskId")) {
                None => complain(404, "InvalidDiskId.NotFound"),
                Some(disk) => {
                    disk["Size"] = json!(get("NewSize").parse::<u64>().unwrap());
                    Reply::Json(200, json!({}))
                }
            },
            "ModifyDiskSpec" => self.modify(given, errored),
            "DescribeTasks" => self.describe_tasks(get("TaskIds")),
            "TagResources" | "UntagResources" => self.tag(given),
            "ModifyDiskAttribute" => {
                self.disks.get_mut(get("DiskId")).unwrap()["BurstingEnabled"] =
                    json!(get("BurstingEnabled") == "true");
                Reply::Json(200, json!({}))
            }
            "DescribeInstanceTypes" => Reply::Json(
                200,
                json!({ "InstanceTypes": { "InstanceType": [
                    { "InstanceTypeId": given["InstanceTypes.1"], "DiskQuantity": 17 },
                ] } }),
            ),
            "DescribeAccountAttributes" => {
                let item = |name: &str, values: Value| json!({ "AttributeName": name, "AttributeValues": { "ValueItem": values } });
                let of = |category: &str, value: &str| json!({ "ZoneId": "cn-hangzhou-h", "DiskCategory": category, "Value": value });
                let most = json!([of("cloud_ssd", "100"), of("cloud_essd", "5000")]);
                let used = json!([of("cloud_ssd", "40")]);
                let items = [
                    item("max-postpaid-yundisk-capacity", most),
                    item("used-postpaid-yundisk-capacity", used),
                ];
                Reply::Json(200, json!({ "AccountAttributeItems": { "AccountAttributeItem": items } }))
            }
            other => complain(404, &format!("InvalidAction.{other}")),
        }
    }

    fn create(&mut self, action: &str, given: &Given) -> Reply {
        let (kind, key) = if action == "CreateDisk" { ("d", "DiskId") } else { ("s", "SnapshotId") };
        let token = given["ClientToken"].clone();
        if let Some((before, id)) = self.tokens.get(&token) {
            return if before == given {
                Reply::Json(200, json!({ key: id }))
            } else {
                complain(400, "IdempotentParameterMismatch")
            };
        }
        let get = |name: &str| given.get(name).cloned().unwrap_or_default();
        let tags: Vec<Value> = (1..)
            .map_while(|number| given.get(&format!("Tag.{number}.Key")).map(|key| (number, key)))
            .map(|(number, key)| json!({ "TagKey": key, "TagValue": given[&format!("Tag.{number}.Value")] }))
            .collect();
        if kind == "d" && get("DiskCategory") == "cloud_efficiency" {
            return complain(403, "InvalidDataDiskCategory.NotSupported");
        }
        if kind == "d" && self.disks.len() >= 10 {
            return complain(403, "QuotaExceed.PostPaidDisk");
        }
        if kind == "s" && !self.disks.contains_key(&given["DiskId"]) {
            return complain(404, "InvalidDiskId.NotFound");
        }
        let id = self.id(kind);
        if kind == "d" {
            let disk = json!({
                "DiskId": id, "ZoneId": given["ZoneId"], "Status": "Available", "Type": "data", "Tags": { "Tag": tags },
                "Category": given["DiskCategory"], "PerformanceLevel": get("PerformanceLevel"),
                "Size": given["Size"].parse::<u64>().unwrap(), "SerialNumber": &id[2..], "MultiAttach": "Disabled",
                "SourceSnapshotId": get("SnapshotId"), "Attachments": { "Attachment": [] }, "_lag": self.lag,
            });
            self.disks.insert(id.clone(), disk);
        } else {
            let snapshot = json!({
                "SnapshotId": id, "SnapshotName": given["SnapshotName"], "SourceDiskId": given["DiskId"],
                "SourceDiskSize": self.disks[&given["DiskId"]]["Size"].to_string(), "Available": self.looks == 0,
                "CreationTime": "2026-01-01T00:00:00Z", "Status": "progressing", "Tags": { "Tag": tags },
                "_looks": self.looks,
            });
            self.snapshots.insert(id.clone(), snapshot);
        }
        self.tokens.insert(token, (given.clone(), id.clone()));
        Reply::Json(200, json!({ key: id }))
    }

    fn describe(&mut self, ids: &str, given: &Given) -> Reply {
        let is_disks = ids == "DiskIds";
        let all = if is_disks { &mut self.disks } else { &mut self.snapshots };
        let ids: Option<Vec<String>> = given.get(ids).map(|ids| serde_json::from_str(ids).unwrap());
        let mut found = Vec::new();
        for (id, one) in all {
            let has = |name: &str, field: &str| given.get(name).is_none_or(|wanted| one[field] == **wanted);
            let tagged = given.get("Tag.1.Key").is_none_or(|key| {
                let tags = one["Tags"]["Tag"].as_array().unwrap();
                tags.iter().any(|tag| {
                    tag["TagKey"] == **key
                        && given.get("Tag.1.Value").is_none_or(|value| tag["TagValue"] == **value)
                })
            });
            let on = given.get("InstanceId").is_none_or(|instance| {
                one["Attachments"]["Attachment"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|a| a["InstanceId"] == **instance)
            });
            if ids.as_ref().is_some_and(|ids| !ids.contains(id))
                || !(has("SnapshotName", "SnapshotName") && has("DiskId", "SourceDiskId") && tagged && on)
            {
                continue;
            }
            if let Some(lag) = one["_lag"].as_u64().filter(|lag| *lag > 0) {
                one["_lag"] = json!(lag - 1);
                continue;
            }
            found.push(one.clone());
            match one["_looks"].as_u64() {
                Some(looks) if looks > 1 => one["_looks"] = json!(looks - 1),
                Some(_) => {
                    let after = one["_after"].clone();
                    for (key, value) in after.as_object().into_iter().flatten() {
                        one[key] = value.clone();
                    }
                    if !is_disks {
                        one["Available"] = json!(true);
                    }
                    one["_looks"] = Value::Null;
                }
                None => {}
            }
        }
        let at: usize = given.get("NextToken").map_or(0, |token| token.parse().unwrap());
        // Pages of two, so that there are several.
        let next = (ids.is_none() && at + 2 < found.len()).then(|| (at + 2).to_string());
        let found: Vec<_> = if ids.is_some() { found } else { found.into_iter().skip(at).take(2).collect() };
        let (outer, inner) = if is_disks { ("Disks", "Disk") } else { ("Snapshots", "Snapshot") };
        Reply::Json(200, json!({ outer: { inner: found }, "NextToken": next }))
    }

    fn move_disk(&mut self, action: &str, id: &str, instance: &str, errored: bool) -> Reply {
        let on = |disk: &Value| disk["Attachments"]["Attachment"] == json!([{ "InstanceId": instance }]);
        let taken = self.disks.values().filter(|disk| on(disk)).count();
        let Some(disk) = self.disks.get_mut(id) else { return complain(404, "InvalidDiskId.NotFound") };
        if !instance.starts_with("i-") {
            return complain(404, "InvalidInstanceId.NotFound");
        }
        let is_attach = action == "AttachDisk";
        let is_ready =
            if is_attach { disk["Status"] == "Available" } else { on(disk) && disk["Status"] == "In_use" };
        if !is_ready {
            return complain(403, "IncorrectDiskStatus");
        }
        if is_attach && taken >= 3 {
            return complain(403, "InstanceDiskLimitExceeded");
        }
        let before = json!({ "Status": disk["Status"], "Attachments": disk["Attachments"] });
        let after = if is_attach {
            json!({ "Status": "In_use", "Attachments": { "Attachment": [{ "InstanceId": instance }] } })
        } else {
            json!({ "Status": "Available", "Attachments": { "Attachment": [] } })
        };
        disk["Status"] = json!(if is_attach { "Attaching" } else { "Detaching" });
        disk["_after"] = if errored { before } else { after };
        disk["_looks"] = json!(self.looks.max(1));
        Reply::Json(200, json!({}))
    }

    fn modify(&mut self, given: &Given, errored: bool) -> Reply {
        let Some(disk) = self.disks.get_mut(&given["DiskId"]) else {
            return complain(404, "InvalidDiskId.NotFound");
        };
        if given.get("DiskCategory").is_some_and(|category| *category == "cloud_essd_entry") {
            return complain(400, "InvalidDiskCategory.NotSupported");
        }
        if given.contains_key("DryRun") {
            return complain(400, "DryRunOperation");
        }
        for (name, field) in [("DiskCategory", "Category"), ("PerformanceLevel", "PerformanceLevel")] {
            if let Some(value) = given.get(name).filter(|_| !errored) {
                disk[field] = json!(value);
            }
        }
        let id = self.id("t");
        self.tasks.insert(id.clone(), (self.looks, if errored { "Failed" } else { "Finished" }));
        Reply::Json(200, json!({ "TaskId": id }))
    }

    fn describe_tasks(&mut self, id: &str) -> Reply {
        let id =
            if id.is_empty() { self.tasks.keys().last().cloned().unwrap_or_default() } else { id.to_owned() };
        let tasks: Vec<Value> = self
            .tasks
            .get_mut(&id)
            .map(|(looks, end)| {
                *looks = looks.saturating_sub(1);
                json!({ "TaskId": id, "TaskStatus": if *looks > 0 { "Processing" } else { *end } })
            })
            .into_iter()
            .collect();
        Reply::Json(200, json!({ "TaskSet": { "Task": tasks } }))
    }

    fn tag(&mut self, given: &Given) -> Reply {
        let id = &given["ResourceId.1"];
        let one = self.disks.get_mut(id).or(self.snapshots.get_mut(id));
        let Some(one) = one else { return complain(404, "InvalidResourceId.NotFound") };
        let tags = one["Tags"]["Tag"].as_array_mut().unwrap();
        for number in 1.. {
            let name = |kind: &str| format!("{kind}.{number}");
            match (given.get(&name("TagKey")), given.get(&format!("Tag.{number}.Key"))) {
                (Some(key), _) => tags.retain(|tag| tag["TagKey"] != **key),
                (None, Some(key)) => {
                    tags.retain(|tag| tag["TagKey"] != **key);
                    tags.push(json!({ "TagKey": key, "TagValue": given[&format!("Tag.{number}.Value")] }));
                }
                (None, None) => break,
            }
        }
        Reply::Json(200, json!({}))
    }
}

/// A driver on such an account.
struct Bench {
    cloud: Arc<Mutex<Cloud>>,
    server: Scripted,
    account: Arc<Account>,
    ctx: Context,
}

fn config(url: &str) -> Config {
    Config {
        driver_name: "diskplugin.csi.alibabacloud.com".to_owned(),
        endpoint: Some(url.to_owned()),
        vpc: false,
        key: Some(AccessKey::new("key", "hush-hush", None).unwrap()),
        rate: 0.0,
        region: Some("cn-hangzhou".to_owned()),
        zone: Some("cn-hangzhou-h".to_owned()),
        node_id: Some("i-1".parse().unwrap()),
        metadata_url: "http://127.0.0.1:9".to_owned(),
        cluster_id: Some("c-1".to_owned()),
        max_volumes: 0,
        private_topology: false,
        device_dir: "/nowhere".into(),
        state_dir: "/nowhere".into(),
        leftover_age: Duration::from_secs(1 << 40),
    }
}

impl Bench {
    async fn new() -> Self {
        let cloud: Arc<Mutex<Cloud>> = Arc::default();
        let answering = cloud.clone();
        let server = Scripted::serve(move |asked| answering.lock().answer(asked)).await;
        let config = config(&server.url);
        let endpoint = Endpoint::parse("--ecs-endpoint", &server.url, &[]).unwrap();
        let api = Api::new(endpoint, config.key.clone().unwrap(), "cn-hangzhou", 0.0).unwrap();
        let account = Account::open(api, "cn-hangzhou", config.zone.clone(), &config).await.unwrap();
        let bench = Self { cloud, server, account, ctx: Context::default() };
        // The first look for what was left over is made before anything is counted.
        while !bench.actions().contains(&"DescribeSnapshots".to_owned()) {
            tokio::task::yield_now().await;
        }
        bench
    }

    /// The actions that were asked for so far.
    fn actions(&self) -> Vec<String> {
        let action = |asked: Asked| asked.headers["x-acs-action"].to_str().unwrap().to_owned();
        self.server.asked().into_iter().map(action).collect()
    }

    fn fault(&self, action: &'static str, fault: Fault) {
        self.cloud.lock().faults.push((action, fault));
    }

    async fn plan(&self, new: &NewVolume) -> crate::Result<volumes::Plan> {
        let mut plan = self.account.plan(&self.ctx, new)?;
        self.account.place(&self.ctx, &mut plan, None).await?;
        Ok(plan)
    }

    async fn create(&self, name: &str, size: i64) -> crate::Result<Volume> {
        self.create_as(&new(name, size, &[("type", "cloud_essd")])).await
    }

    async fn create_as(&self, new: &NewVolume) -> crate::Result<Volume> {
        let plan = self.plan(new).await?;
        if let Some(found) = self.account.find(&self.ctx, &plan).await? {
            return Ok(found);
        }
        self.account.create(&self.ctx, plan).await
    }

    async fn attach(&self, volume: &Volume, node: &str) -> crate::Result<BTreeMap<String, String>> {
        let volume = self.account.get(&self.ctx, &volume.id).await.unwrap().unwrap();
        self.account.attach(&self.ctx, &volume, &node.parse().unwrap(), &capability()).await
    }

    async fn detach(&self, volume: &Volume, node: &str) -> crate::Result<()> {
        self.account.get(&self.ctx, &volume.id).await.unwrap();
        self.account.detach(&self.ctx, &volume.id, Some(&node.parse().unwrap())).await
    }

    fn counts(&self) -> (usize, usize) {
        let cloud = self.cloud.lock();
        (cloud.disks.len(), cloud.snapshots.len())
    }
}

fn capability() -> VolumeCapability {
    let access = Access::Mount { fs_type: String::new(), flags: vec![], group: None };
    VolumeCapability { access, mode: AccessMode::SingleNodeWriter }
}

fn map(pairs: &[(&str, &str)]) -> Parameters {
    pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn new(name: &str, required: i64, parameters: &[(&str, &str)]) -> NewVolume {
    NewVolume {
        name: name.parse().unwrap(),
        range: CapacityRange::new(required, 0).unwrap(),
        capabilities: vec![capability()],
        parameters: map(parameters),
        mutable: Parameters::new(),
        ephemeral: false,
    }
}

fn tags_of(disk: &Value) -> BTreeMap<String, String> {
    let tags = disk["Tags"]["Tag"].as_array().unwrap();
    tags.iter()
        .map(|tag| (tag["TagKey"].as_str().unwrap().to_owned(), tag["TagValue"].as_str().unwrap().to_owned()))
        .collect()
}

#[tokio::test]
async fn a_volume_is_made_as_upstream_makes_it_and_found_again() {
    let bench = Bench::new().await;
    let made = bench.create("disk-1", 41 * GIB / 2).await.unwrap();
    assert_eq!((made.capacity, made.context["type"].as_str()), (Capacity::gibibytes(21), "cloud_essd"));
    let zone = Topology::single("topology.diskplugin.csi.alibabacloud.com/zone", "cn-hangzhou-h");
    assert_eq!(*made.topology.clone().unwrap(), zone);
    let again = bench.create("disk-1", 41 * GIB / 2).await.unwrap();
    assert_eq!((again.id, bench.counts()), (made.id.clone(), (1, 0)));
    let tags = tags_of(&bench.cloud.lock().disks[made.id.as_str()]);
    let expected = map(&[
        ("ack.aliyun.com", "c-1"),
        ("createdby", "alibabacloud-csi-plugin"),
        ("csi.alibabacloud.com/volume-name", "disk-1"),
        ("k8s.aliyun.com", "true"),
    ]);
    assert_eq!(tags, expected);
    assert!(bench.cloud.lock().tokens.contains_key("n:disk-1"));
    let other = bench.create_as(&new("disk-1", 21 * GIB, &[("type", "cloud_ssd")])).await.unwrap_err();
    assert!(matches!(&other, Error::Conflict(said) if said.contains("cloud_essd")), "{other}");

    let range = CapacityRange::new(51 * GIB / 2, 0).unwrap();
    bench.account.get(&bench.ctx, &made.id).await.unwrap();
    let expanded = bench.account.expand(&bench.ctx, &made, range).await.unwrap();
    assert_eq!(expanded.capacity, Capacity::gibibytes(26));
    bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    assert_eq!(bench.counts(), (0, 0));
    // The token of the name stands for a disk that is gone.
    let anew = bench.create("disk-1", 41 * GIB / 2).await.unwrap();
    assert!(anew.id != made.id && bench.counts() == (1, 0));
}

#[tokio::test]
async fn types_are_tried_in_turn_and_a_zone_without_them_is_resource_exhausted() {
    let bench = Bench::new().await;
    let wanted = [("type", "cloud_efficiency,cloud_essd"), ("performanceLevel", "PL1")];
    let made = bench.create_as(&new("disk-1", 20 * GIB, &wanted)).await.unwrap();
    assert_eq!((&*made.context["type"], &*made.context["performanceLevel"]), ("cloud_essd", "PL1"));
    let error = bench.create_as(&new("disk-2", GIB, &[("type", "cloud_efficiency")])).await.unwrap_err();
    assert!(matches!(&error, Error::Exhausted(said) if said.contains("R-77")), "{error}");
    bench.fault("CreateDisk", Fault::Before(400, "InvalidDiskSize.NotSupported"));
    let error = bench.create("disk-3", GIB).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(_)), "{error}");
    let unknown = new("disk-4", GIB, &[("iops", "9")]);
    let error = bench.account.plan(&bench.ctx, &unknown).unwrap_err();
    assert!(error.to_string().starts_with("parameter \"iops\" is not known; known are type,"), "{error}");
}

#[tokio::test]
async fn zones_are_those_of_nodes_and_of_the_class() {
    let bench = Bench::new().await;
    let zone = |zone: &str| {
        Topology(map(&[("topology.kubernetes.io/zone", zone), ("alibabacloud.com/ecs-instance-id", "i-1")]))
    };
    let place = async |parameters: &[(&str, &str)], zones: &[&str]| {
        let mut plan = bench.account.plan(&bench.ctx, &new("v", GIB, parameters)).unwrap();
        let requisite: Vec<_> = zones.iter().map(|name| bench.account.canonical(zone(name))).collect();
        let wanted = TopologyRequirement { requisite, preferred: vec![] };
        let wanted = Some(&wanted).filter(|_| !zones.is_empty());
        bench.account.place(&bench.ctx, &mut plan, wanted).await
    };
    let is = |placed: crate::Result<Topology>, key: &str, value: &str| {
        assert_eq!(placed.unwrap(), Topology::single(key, value));
    };
    is(place(&[], &[]).await, OWN_ZONE, "cn-hangzhou-h");
    is(place(&[], &["cn-hangzhou-i", "cn-hangzhou-j"]).await, OWN_ZONE, "cn-hangzhou-i");
    is(
        place(&[("zoneId", "cn-hangzhou-j")], &["cn-hangzhou-i", "cn-hangzhou-j"]).await,
        OWN_ZONE,
        "cn-hangzhou-j",
    );
    is(place(&[("zoneId", "cn-hangzhou-j")], &[]).await, OWN_ZONE, "cn-hangzhou-j");
    let regional = [("type", "cloud_regional_disk_auto")];
    is(place(&regional, &["cn-hangzhou-i"]).await, KUBERNETES_REGION, "cn-hangzhou");
    let refused = place(&[("zoneId", "cn-hangzhou-j")], &["cn-hangzhou-i"]).await.unwrap_err();
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
    let elsewhere = TopologyRequirement {
        requisite: vec![bench.account.canonical(Topology::single(KUBERNETES_REGION, "cn-beijing"))],
        preferred: vec![],
    };
    let mut plan = bench.account.plan(&bench.ctx, &new("v", GIB, &[])).unwrap();
    let refused = bench.account.place(&bench.ctx, &mut plan, Some(&elsewhere)).await.unwrap_err();
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
    let error = bench.account.plan(&bench.ctx, &new("v", GIB, &[("regionId", "cn-beijing")])).unwrap_err();
    assert!(error.to_string().contains("regionId"), "{error}");
}

#[tokio::test]
async fn a_server_that_fails_after_the_work_makes_no_second_disk_or_snapshot() {
    let bench = Bench::new().await;
    for (name, fault) in [
        ("a1", Fault::After(500)),
        ("b1", Fault::After(503)),
        ("c1", Fault::DropAfter),
        ("d1", Fault::Before(503, "ServiceUnavailable")),
    ] {
        bench.fault("CreateDisk", fault);
        bench.create(name, GIB).await.unwrap();
    }
    assert_eq!(bench.counts(), (4, 0));
    let source = bench.create("a1", GIB).await.unwrap();
    let wanted = NewSnapshot {
        name: "snap".parse().unwrap(),
        source: source.id.clone(),
        parameters: Parameters::new(),
    };
    bench.fault("CreateSnapshot", Fault::After(502));
    let taken = bench.account.take_snapshot(&bench.ctx, wanted.clone(), &source).await.unwrap();
    let found = bench.account.find_snapshot(&bench.ctx, &wanted).await.unwrap().unwrap();
    assert_eq!((taken.id, bench.counts()), (found.id, (4, 1)));
    // An attachment whose answer was lost is found, and so is a detachment.
    bench.fault("AttachDisk", Fault::After(504));
    bench.attach(&source, "i-1").await.unwrap();
    bench.fault("DetachDisk", Fault::DropAfter);
    bench.detach(&source, "i-1").await.unwrap();
    // Nothing was done, however often it was tried, and nothing is claimed.
    for _ in 0..8 {
        bench.fault("CreateDisk", Fault::Before(500, "InternalError"));
    }
    let error = bench.create("e1", GIB).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(said) if said.contains("request R-77")), "{error}");
    assert_eq!(bench.counts(), (4, 1));
}

#[tokio::test]
async fn a_disk_that_descriptions_do_not_show_yet_is_not_taken_to_be_gone() {
    let bench = Bench::new().await;
    bench.cloud.lock().lag = 3;
    let made = bench.create("disk-1", GIB).await.unwrap();
    assert_eq!((made.capacity, bench.counts()), (Capacity::gibibytes(20), (1, 0)));
    let found = bench.account.get(&bench.ctx, &made.id).await.unwrap();
    assert!(found.is_some());
    let told = bench.attach(&made, "i-1").await.unwrap();
    assert_eq!(told["serialNumber"], made.id.as_str()[2..]);
    assert!(bench.account.get(&bench.ctx, &"d-unknown".parse().unwrap()).await.unwrap().is_none());
    assert!(bench.account.get(&bench.ctx, &"no id/at all".parse().unwrap()).await.unwrap().is_none());
}

#[tokio::test]
async fn what_errors_fails_at_once_and_what_takes_time_is_waited_for() {
    let bench = Bench::new().await;
    bench.cloud.lock().looks = 3;
    let volume = bench.create("disk-1", GIB).await.unwrap();
    let told = bench.attach(&volume, "i-1").await.unwrap();
    assert_eq!(bench.attach(&volume, "i-1").await.unwrap(), told);
    let error = bench.attach(&volume, "i-2").await.unwrap_err();
    assert!(matches!(&error, Error::Precondition(said) if said.contains("\"i-1\"")), "{error}");
    bench.detach(&volume, "i-2").await.unwrap();
    assert_eq!(bench.account.get(&bench.ctx, &volume.id).await.unwrap().unwrap().attachments.len(), 1);
    let error = bench.account.delete(&bench.ctx, &volume.id).await.unwrap_err();
    assert!(matches!(error, Error::Precondition(_)), "{error}");
    bench.fault("DetachDisk", Fault::Errored);
    let start = std::time::Instant::now();
    let error = bench.detach(&volume, "i-1").await.unwrap_err();
    assert!(matches!(&error, Error::State(said) if said.contains("In_use")), "{error}");
    bench.detach(&volume, "i-1").await.unwrap();
    bench.detach(&volume, "i-1").await.unwrap();
    bench.fault("AttachDisk", Fault::Errored);
    let error = bench.attach(&volume, "i-1").await.unwrap_err();
    assert!(matches!(&error, Error::State(said) if said.contains("attach")), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60));
    // An attachment that is under way is detached all the same.
    bench
        .account
        .api
        .attach_disk(volume.id.as_str(), "i-1", Deadline::after(Duration::from_secs(5)))
        .await
        .unwrap();
    bench.detach(&volume, "i-1").await.unwrap();
    assert!(bench.account.get(&bench.ctx, &volume.id).await.unwrap().unwrap().attachments.is_empty());
}

#[tokio::test]
async fn an_instance_that_is_full_unknown_or_busy_is_told_apart() {
    let bench = Bench::new().await;
    let mut volumes = Vec::new();
    for name in ["a1", "b1", "c1", "d1"] {
        volumes.push(bench.create(name, GIB).await.unwrap());
    }
    // Something else is done to the instance: it is asked again.
    bench.fault("AttachDisk", Fault::Before(403, "IncorrectInstanceStatus"));
    bench.fault("AttachDisk", Fault::Before(429, "Throttling.User"));
    for volume in &volumes[..3] {
        bench.attach(volume, "i-1").await.unwrap();
    }
    let error = bench.attach(&volumes[3], "i-1").await.unwrap_err();
    assert!(matches!(&error, Error::Exhausted(said) if said.contains("instance type")), "{error}");
    let error = bench.attach(&volumes[3], "fake-node").await.unwrap_err();
    assert!(matches!(&error, Error::NotFound { what: "node", .. }), "{error}");
    bench.fault("AttachDisk", Fault::Before(403, "Forbidden.RAM"));
    assert!(matches!(bench.attach(&volumes[3], "i-2").await, Err(Error::Denied(_))));
    let listed = bench.account.list(&bench.ctx, &PageRequest { after: None, limit: 3 }).await.unwrap();
    let nodes: Vec<_> = listed.entries.iter().map(|volume| volume.attachments[0].node.to_string()).collect();
    assert_eq!((nodes, listed.next.is_some()), (vec!["i-1".to_owned(); 3], true));
    let rest = bench.account.list(&bench.ctx, &PageRequest { after: listed.next, limit: 3 }).await.unwrap();
    assert_eq!((rest.entries.len(), rest.next), (1, None));
    let limit = limit_of(Some(&bench.account.api), &"i-1".parse().unwrap(), "ecs.g7.large").await;
    assert_eq!(limit, Some(16), "one is the system disk, and the volumes there do not count");
    assert_eq!(limit_of(None, &"i-1".parse().unwrap(), "ecs.g7.large").await, None);
}

#[tokio::test]
async fn a_clone_is_a_snapshot_and_a_disk_of_it_and_nothing_is_left_whatever_breaks() {
    let bench = Bench::new().await;
    bench.cloud.lock().looks = 2;
    let source = bench.create("source", 20 * GIB).await.unwrap();
    let clone_of = async |name: &str| {
        let plan = bench.plan(&new(name, 30 * GIB, &[("type", "cloud_essd")])).await?;
        match bench.account.find(&bench.ctx, &plan).await? {
            Some(found) => Ok(found),
            None => bench.account.clone_volume(&bench.ctx, plan, &source).await,
        }
    };
    let clone = clone_of("clone").await.unwrap();
    assert_eq!(clone.capacity, Capacity::gibibytes(30));
    assert_eq!(clone.source, Some(ContentSource::Volume(source.id.clone())));
    assert_eq!(bench.counts(), (2, 0));
    // Cut off at each request in turn; the call is made again until it succeeds.
    for (number, action) in
        ["CreateSnapshot", "DescribeSnapshots", "CreateDisk", "DeleteSnapshot"].into_iter().enumerate()
    {
        let name = format!("clone-{number}");
        for _ in 0..5 {
            bench.fault(action, Fault::Before(500, "InternalError"));
        }
        let mut made = clone_of(&name).await;
        for _ in 0..4 {
            if made.is_err() {
                made = clone_of(&name).await;
            }
        }
        let made = made.unwrap();
        bench.cloud.lock().faults.clear();
        assert_eq!(bench.counts(), (3, 0), "{action}");
        bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    }
    // An end that is final leaves nothing either.
    bench.fault("CreateDisk", Fault::Before(403, "QuotaExceed.DiskCapacity"));
    assert!(matches!(clone_of("full").await, Err(Error::Exhausted(_))));
    assert_eq!(bench.counts(), (2, 0));
    // A driver that was killed before there was a volume: nobody sees the snapshot, and it is removed after a while.
    let left = api::NewEcsSnapshot {
        disk: source.id.to_string(),
        name: "berth-clone-left".to_owned(),
        tags: map(&[(names::CLONE_TAG, source.id.as_str()), ("createdby", "alibabacloud-csi-plugin")]),
        ..api::NewEcsSnapshot::default()
    };
    bench.account.snapshot_now(&left, Deadline::after(Duration::from_secs(30))).await.unwrap();
    let all = PageRequest { after: None, limit: 9 };
    let listed = bench.account.list_snapshots(&bench.ctx, None, &all).await.unwrap();
    assert!(listed.entries.is_empty(), "snapshots of clones belong to nobody");
    bench.account.clean(Duration::from_secs(3600)).await.unwrap();
    assert_eq!(bench.counts().1, 1, "not while this program may need it");
    bench.account.clean(Duration::ZERO).await.unwrap();
    assert_eq!(bench.counts(), (2, 0));
}

#[tokio::test]
async fn a_restored_volume_knows_its_snapshot_and_a_snapshot_its_class() {
    let bench = Bench::new().await;
    let source = bench.create("source", 20 * GIB).await.unwrap();
    let wanted = NewSnapshot {
        name: "snap".parse().unwrap(),
        source: source.id.clone(),
        parameters: map(&[("snapshotTags/team", "blue")]),
    };
    let taken = bench.account.take_snapshot(&bench.ctx, wanted, &source).await.unwrap();
    assert_eq!((taken.size, taken.source.clone()), (Capacity::gibibytes(20), source.id.clone()));
    assert_eq!(tags_of(&bench.cloud.lock().snapshots[taken.id.as_str()])["team"], "blue");
    let class = [("type", "cloud_auto")];
    let plan = bench.plan(&new("small", GIB, &class)).await.unwrap();
    let restored = bench.account.restore(&bench.ctx, plan, &taken).await.unwrap();
    assert_eq!(restored.capacity, Capacity::gibibytes(20), "not smaller than the snapshot");
    let plan = bench.plan(&new("small", GIB, &class)).await.unwrap();
    let found = bench.account.find(&bench.ctx, &plan).await.unwrap().unwrap();
    assert_eq!(found.source, Some(ContentSource::Snapshot(taken.id.clone())));
    let all = PageRequest { after: None, limit: 9 };
    for (of, count) in [(None, 1), (Some(&source.id), 1), (Some(&restored.id), 0)] {
        let listed = bench.account.list_snapshots(&bench.ctx, of, &all).await.unwrap();
        assert_eq!(listed.entries.len(), count);
    }
    bench.account.delete_snapshot(&bench.ctx, &taken.id).await.unwrap();
    bench.account.delete_snapshot(&bench.ctx, &taken.id).await.unwrap();
    assert!(bench.account.snapshot(&bench.ctx, &taken.id).await.unwrap().is_none());
}

#[tokio::test]
async fn what_a_class_changes_is_changed_all_or_none() {
    let bench = Bench::new().await;
    bench.cloud.lock().looks = 2;
    let volume = bench.create("disk-1", 20 * GIB).await.unwrap();
    let modify = async |pairs: &[(&str, &str)]| {
        let volume = bench.account.get(&bench.ctx, &volume.id).await.unwrap().unwrap();
        bench.account.modify(&bench.ctx, &volume, map(pairs)).await
    };
    modify(&[("type", "cloud_auto"), ("burstingEnabled", "true"), ("diskTags/a", "1"), ("diskTags/b", "2")])
        .await
        .unwrap();
    let disk = bench.cloud.lock().disks[volume.id.as_str()].clone();
    assert_eq!((&disk["Category"], &disk["BurstingEnabled"]), (&json!("cloud_auto"), &json!(true)));
    assert_eq!((&*tags_of(&disk)["a"], &*tags_of(&disk)["b"]), ("1", "2"));
    // What is so already costs one look.
    let before = bench.actions().len();
    modify(&[("type", "cloud_auto"), ("diskTags/a", "1"), ("-diskTags/c", "")]).await.unwrap();
    assert_eq!(bench.actions()[before..], ["DescribeDisks"]);
    // One that is impossible changes nothing, and one that fails says so at once.
    let error = modify(&[("type", "cloud_essd_entry"), ("-diskTags/a", "")]).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(_)), "{error}");
    assert!(tags_of(&bench.cloud.lock().disks[volume.id.as_str()]).contains_key("a"));
    let error = modify(&[("XXX_FakeKey", "x")]).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(said) if said.contains("XXX_FakeKey")), "{error}");
    bench.fault("ModifyDiskSpec", Fault::Before(400, "DryRunOperation"));
    bench.fault("ModifyDiskSpec", Fault::Errored);
    let error = modify(&[("type", "cloud_essd")]).await.unwrap_err();
    assert!(matches!(&error, Error::State(said) if said.contains("Failed")), "{error}");
    // The answer is lost, the change is not.
    bench.fault("ModifyDiskSpec", Fault::Before(400, "DryRunOperation"));
    bench.fault("ModifyDiskSpec", Fault::DropAfter);
    modify(&[("type", "cloud_essd"), ("-diskTags/a", "")]).await.unwrap();
    let disk = bench.cloud.lock().disks[volume.id.as_str()].clone();
    assert!(disk["Category"] == "cloud_essd" && !tags_of(&disk).contains_key("a"), "{disk}");
}

#[tokio::test]
async fn capacity_is_what_the_quota_leaves_and_its_end_is_resource_exhausted() {
    let bench = Bench::new().await;
    let ask = async |pairs: &[(&str, &str)], topology: Option<Topology>| {
        let topology = topology.map(|topology| bench.account.canonical(topology));
        let found =
            bench.account.available_capacity(&bench.ctx, &map(pairs), topology.as_ref()).await.unwrap();
        found.available
    };
    let at = |key: &str, value: &str| Some(Topology::single(key, value));
    assert_eq!(ask(&[("type", "cloud_ssd")], None).await, Capacity::gibibytes(60));
    assert_eq!(
        ask(&[("type", "cloud_essd")], at(KUBERNETES_ZONE, "cn-hangzhou-h")).await,
        Capacity::gibibytes(5000)
    );
    assert_eq!(ask(&[("type", "cloud_ssd")], at(KUBERNETES_ZONE, "cn-hangzhou-i")).await, Capacity::ZERO);
    assert_eq!(ask(&[("type", "cloud_ssd")], at(KUBERNETES_REGION, "cn-beijing")).await, Capacity::ZERO);
    for number in 0..10 {
        bench.create(&format!("disk-{number}"), GIB).await.unwrap();
    }
    let error = bench.create("one-more", GIB).await.unwrap_err();
    assert!(matches!(error, Error::Exhausted(_)), "{error}");
}

#[tokio::test]
async fn many_lookups_cost_few_requests() {
    let bench = Bench::new().await;
    let mut volumes = Vec::new();
    for number in 0..8 {
        volumes.push(bench.create(&format!("disk-{number}"), GIB).await.unwrap().id);
    }
    let before = bench.actions().len();
    let all =
        futures_util::future::join_all(volumes.iter().map(|id| bench.account.get(&bench.ctx, id))).await;
    assert!(all.iter().all(|found| found.as_ref().unwrap().is_some()));
    // One for who came first, and one for all others.
    let asked = bench.actions().len() - before;
    assert!(asked <= 2, "{asked} requests for 8 volumes");
}

#[tokio::test]
async fn the_secret_is_in_no_error_and_a_wrong_key_ends_the_start() {
    let server = Scripted::serve(|asked| {
        let authorization = asked.headers["authorization"].to_str().unwrap();
        assert!(authorization.starts_with("ACS3-HMAC-SHA256 Credential=key,"), "{authorization}");
        Reply::Json(
            400,
            json!({
                "Code": "SignatureDoesNotMatch", "RequestId": "R-1",
                "Message": "Specified signature is not matched. server string to sign is:everything",
            }),
        )
    })
    .await;
    let config = config(&server.url);
    assert!(!format!("{config:?}").contains("hush"));
    let error = Aliyun::open(config.clone(), Mode::Controller).await.unwrap_err().to_string();
    assert!(error.contains("not accepted") && error.contains("R-1"), "{error}");
    assert!(!error.contains("hush") && !error.contains("everything"), "{error}");
    for (changed, word) in [
        (
            Config { endpoint: Some("http://ecs.cn-hangzhou.aliyuncs.com/".to_owned()), ..config.clone() },
            "loopback",
        ),
        (Config { endpoint: Some(format!("{}path", server.url)), ..config.clone() }, "path"),
        (Config { key: None, ..config.clone() }, "ALIBABA_CLOUD_ACCESS_KEY_ID"),
    ] {
        let error = Aliyun::open(changed, Mode::Controller).await.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[tokio::test]
async fn a_node_learns_what_it_is_with_a_token_and_needs_no_key() {
    let server = Scripted::serve(|asked| match asked.line().as_str() {
        "PUT /latest/api/token" => {
            assert_eq!(asked.headers["x-aliyun-ecs-metadata-token-ttl-seconds"], "63");
            Reply::Json(200, json!("token-1"))
        }
        "GET /latest/dynamic/instance-identity/document" => {
            assert_eq!(asked.headers["x-aliyun-ecs-metadata-token"], "token-1");
            let document = json!({
                "region-id": "cn-hangzhou", "zone-id": "cn-hangzhou-i", "instance-id": "i-9",
                "instance-type": "ecs.g7.large", "image-id": "x",
            });
            Reply::Json(200, document)
        }
        _ => Reply::Json(404, Value::Null),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        region: None,
        zone: None,
        node_id: None,
        key: None,
        metadata_url: server.url.clone(),
        state_dir: dir.path().to_owned(),
        ..config(&server.url)
    };
    let cloud = Aliyun::open(config.clone(), Mode::Node).await.unwrap();
    let node = cloud.node.as_ref().unwrap();
    let expected = Topology(map(&[
        ("alibabacloud.com/ecs-instance-id", "i-9"),
        ("topology.diskplugin.csi.alibabacloud.com/zone", "cn-hangzhou-i"),
        ("topology.kubernetes.io/region", "cn-hangzhou"),
        ("topology.kubernetes.io/zone", "cn-hangzhou-i"),
    ]));
    assert_eq!((node.id.as_str(), &node.topology, node.limit), ("i-9", &expected, None));
    let private = Config { private_topology: true, max_volumes: 7, ..config };
    let cloud = Aliyun::open(private, Mode::Node).await.unwrap();
    let node = cloud.node.as_ref().unwrap();
    assert_eq!((node.topology.0.contains_key(KUBERNETES_ZONE), node.limit), (false, Some(7)));
    assert_eq!(node.topology.0[OWN_REGION], "cn-hangzhou");
}

#[test]
fn a_device_is_known_by_its_serial_number_and_a_cache_is_refused() {
    let mut volume = NodeVolume {
        id: "d-bp1abc".parse().unwrap(),
        capability: capability(),
        read_only: false,
        context: map(&[("type", "cloud_essd")]),
        publish_context: map(&[("serialNumber", "bp1abc")]),
        staging: None,
    };
    let wanted = Volumes.wanted(&volume).unwrap();
    assert_eq!(wanted.links, ["virtio-bp1abc", "nvme-Alibaba_Cloud_Elastic_Block_Storage_bp1abc"]);
    assert_eq!(wanted.identity, Identity::Serial("bp1abc".to_owned()));
    volume.context.insert("dataCacheSize".to_owned(), "10Gi".to_owned());
    assert!(
        matches!(Volumes.wanted(&volume), Err(Error::Precondition(said)) if said.contains("dataCacheSize"))
    );
    volume.context.clear();
    for wrong in [None, Some(""), Some("../x")] {
        volume.publish_context = wrong.map(|serial| map(&[("serialNumber", serial)])).unwrap_or_default();
        assert!(matches!(Volumes.wanted(&volume), Err(Error::Invalid(_))), "{wrong:?}");
    }
}
