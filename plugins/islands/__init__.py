"""Islands: several runs that average their weights over slow links."""
