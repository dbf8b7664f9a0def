//! The report as one HTML file without scripts or further files, readable on a phone.

use std::fmt::Write as _;

use super::{Report, Status, escape};

const STYLE: &str = ":root{color-scheme:light dark}body{font:16px/1.45 system-ui,sans-serif;margin:0 auto;max-width:60rem;\
padding:1rem}h1{font-size:1.3rem}table{border-collapse:collapse}td,th{padding:.1rem .8rem .1rem 0;text-align:left}\
details{border-bottom:1px solid #8884;padding:.45rem 0}summary{cursor:pointer;overflow-wrap:anywhere}\
.passed{color:#2e7d32}.failed{color:#c62828;font-weight:600}.not-run{color:#8a6d00}\
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem;background:#8881;padding:.5rem}small{opacity:.75}";

pub(super) fn page(report: &Report) -> String {
    let counts = report.counts();
    let title = escape(&format!("CSI report of {} {}", report.driver, report.version));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{title}</title>\
         <style>{STYLE}</style></head><body><h1>{title}</h1>\n<table>\
         <tr><td class=\"passed\">passed</td><td>{}</td></tr>\
         <tr><td class=\"failed\">failed, MUST</td><td>{}</td></tr>\
         <tr><td class=\"failed\">failed, SHOULD and INFO</td><td>{}</td></tr>\
         <tr><td class=\"not-run\">not run</td><td>{}</td></tr></table>\n",
        counts.passed, counts.failed_must, counts.failed_other, counts.not_run
    );
    for (status, heading) in
        [(Status::Failed, "Failed"), (Status::NotRun, "Not run"), (Status::Passed, "Passed")]
    {
        let results: Vec<_> = report.results.iter().filter(|result| result.status == status).collect();
        if results.is_empty() {
            continue;
        }
        let _ = writeln!(page, "<h2>{heading} ({})</h2>", results.len());
        for result in results {
            let class = status.word().replace(' ', "-");
            let open = if status == Status::Failed { " open" } else { "" };
            let _ = write!(
                page,
                "<details id=\"{id}\"{open}><summary><span class=\"{class}\">{} {id}</span> <small>{}</small> {}</summary>\
                 <p>{}<br><small>CSI specification: {}</small></p>",
                status.mark(),
                result.rule.level,
                escape(&result.detail),
                escape(&result.rule.rule),
                escape(&result.rule.section),
                id = result.rule.id,
            );
            if status == Status::Failed {
                let _ = write!(page, "<p>To do: {}</p>", escape(&result.rule.advice));
            }
            for call in &result.calls {
                let (request, answer) = (escape(&call.request), escape(&call.answer));
                let _ = write!(page, "<pre>{}\n{request}\n→ {answer}</pre>", call.method);
            }
            page.push_str("</details>\n");
        }
    }
    page + "</body></html>\n"
}
