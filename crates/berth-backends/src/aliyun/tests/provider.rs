//! An API that remembers disks as ECS does, and fails when it is told to.

use super::*;

/// An account of the provider.
#[derive(Default)]
pub(super) struct Cloud {
    pub(super) disks: BTreeMap<String, Value>,
    pub(super) snapshots: BTreeMap<String, Value>,
    /// What was asked for with a token, and what was made.
    pub(super) tokens: BTreeMap<String, (BTreeMap<String, String>, String)>,
    /// Tasks that change disks: how often each is still described as under way, and how it ends.
    pub(super) tasks: BTreeMap<String, (u32, &'static str)>,
    pub(super) next: u64,
    /// How often something is described before it is done.
    pub(super) looks: u32,
    /// How often a new disk is missing from descriptions.
    pub(super) lag: u32,
    /// What happens to the next requests of an action.
    pub(super) faults: Vec<(&'static str, Fault)>,
}

#[derive(Clone, PartialEq)]
pub(super) enum Fault {
    Before(u16, &'static str),
    After(u16),
    DropAfter,
    Errored,
}

pub(super) type Given = BTreeMap<String, String>;

pub(super) fn complain(status: u16, code: &str) -> Reply {
    Reply::Json(status, json!({ "Code": code, "Message": "no", "RequestId": "R-77" }))
}

pub(super) fn decode(text: &str) -> String {
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
    pub(super) fn answer(&mut self, asked: &Asked) -> Reply {
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

    pub(super) fn id(&mut self, kind: &str) -> String {
        self.next += 1;
        format!("{kind}-{:04}", self.next)
    }

    pub(super) fn work(&mut self, action: &str, given: &Given, errored: bool) -> Reply {
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

    pub(super) fn create(&mut self, action: &str, given: &Given) -> Reply {
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
