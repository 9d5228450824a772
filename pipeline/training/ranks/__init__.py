"""The processes that train one model together: how they start, meet, agree, and notice a loss."""
